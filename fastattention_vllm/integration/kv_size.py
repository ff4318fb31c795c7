"""Reads from vLLM's configuration which layers have a KV cache, and how large it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastattention_vllm.integration import compat
from fastattention_vllm.placement.kv_size import KvSize
from fastattention_vllm.placement.plan import Layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def layers_of(vllm_config: VllmConfig) -> Layers:
    """The layers with a KV cache of their own, as far as the model's configuration says."""
    model, parallel, scheduler = vllm_config.model_config, vllm_config.parallel_config, vllm_config.scheduler_config
    text: Any = model.hf_text_config
    shared = getattr(text, "num_kv_shared_layers", None) or 0
    layers = model.get_num_layers_by_block_type(parallel) - shared
    if model.attn_type == "encoder_only":
        layers = 0
    kinds = (getattr(text, "layer_types", None) or ["sliding_attention"] * layers)[:layers]
    windowed = [index for index, kind in enumerate(kinds) if "sliding" in kind] if _window(vllm_config) else []
    if scheduler.disable_hybrid_kv_cache_manager and len(windowed) < layers:
        windowed = []  # then vLLM keeps whole sequences for windowed layers too
    full = [index for index in range(layers) if index not in windowed]
    # The layers at the end share the cache of the last one of their kind.
    fixed = frozenset(kind[-1] for kind in (full, windowed) if kind) if shared else frozenset()
    return Layers(tuple(full), tuple(windowed), fixed)


def _window(vllm_config: VllmConfig) -> int:
    model = vllm_config.model_config
    # A model that alternates without saying which layers have a window is taken to have none.
    unsaid = getattr(model.hf_text_config, "interleaved_sliding_window", None)
    return 0 if unsaid else model.get_sliding_window() or 0


def kv_size_of(vllm_config: VllmConfig) -> KvSize:
    # Not at the top: while vLLM (seen in 0.28) imports that module, it resolves the platform, which imports this one.
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    layers = layers_of(vllm_config)
    dtype = kv_cache_dtype_str_to_dtype(cache.cache_dtype, model)
    heads = model.get_num_kv_heads(parallel)
    return KvSize(
        block_size=cache.block_size,
        bytes_per_block=2 * cache.block_size * heads * model.get_head_size() * dtype.itemsize,
        full_layers=len(layers.full),
        windowed_layers=len(layers.windowed),
        window=_window(vllm_config),
        tokens_per_step=compat.most_tokens_in_flight(vllm_config),
    )
