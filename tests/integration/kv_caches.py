"""KV cache tensors as the installed vLLM passes them to this backend, and as upstream's own tests do."""

from __future__ import annotations

import importlib.util

import torch

from fastattention_vllm.integration.cpu.backend import FastAttentionBackend

HAS_LAYOUTS = importlib.util.find_spec("vllm.v1.kv_cache_layout") is not None
"""vLLM >= 0.29 lays the cache out itself, in one of the layouts that the backend declares."""


def kinds() -> list[str]:
    """Names of the layouts for :func:`empty_cache`."""
    declared = [layout.name for layout in FastAttentionBackend.supported_kv_cache_layouts()] if HAS_LAYOUTS else []
    return [*declared, "shape of the backend", "5-D of upstream's tests"]


def empty_cache(kind: str, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> torch.Tensor:
    """A cache filled with NaN."""
    shape = FastAttentionBackend.get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)
    if kind == "shape of the backend":
        return torch.full(shape, float("nan"))
    if kind == "5-D of upstream's tests":
        return torch.full((num_blocks, 2, block_size, num_kv_heads, head_size), float("nan"))
    from vllm.v1.kv_cache_layout import KVCacheLayout

    order = KVCacheLayout[kind].layer_view_order
    physical = torch.full([shape[i] for i in order], float("nan"))
    return physical.permute([order.index(i) for i in range(4)])
