"""Attention with an installed xformers, for problems that the Volta kernels refuse. Not yet run on a V100.

xformers does not support pages. Keys and values are first gathered into contiguous tensors, which costs an additional
read and write.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import torch

DTYPES = (torch.float16, torch.float32)
HEAD_SIZE_MULTIPLE = 8
"""xformers' kernels for V100 load 16 bytes at a time."""


@functools.cache
def version() -> str | None:
    """The version of the installed xformers, or None."""
    try:
        return importlib.metadata.version("xformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def bias(q_lens: Sequence[int], kv_lens: Sequence[int], *, causal: bool, window: int) -> Any:
    """xformers' mask for concatenated sequences. The last query of each sequence sees its last key.

    Args:
        window: number of keys before itself that a query sees, as in ``AttentionProblem``; -1 for all. Only with
            ``causal``.
    """
    masks: Any = importlib.import_module("xformers.ops.fmha.attn_bias")
    blocks = masks.BlockDiagonalMask.from_seqlens(list(q_lens), list(kv_lens))
    if not causal:
        if window >= 0:
            raise ValueError(f"the window is {window}, but xformers supports windows only with a causal mask.")
        return blocks
    if window >= 0:
        return blocks.make_local_attention_from_bottomright(window + 1)  # which counts the query's own key
    return blocks.make_causal_from_bottomright()


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float) -> torch.Tensor:
    """``query [tokens, heads, head_size]``, ``key`` and ``value`` ``[kv_tokens, KV heads, head_size]`` in one piece;
    ``mask`` by :func:`bias`. Returns what is like ``query``.

    Raises ``NotImplementedError`` by xformers where it has no kernel for this GPU.
    """
    ops: Any = importlib.import_module("xformers.ops")
    tokens, heads, size = query.shape
    kv_tokens, kv_heads, _ = key.shape
    group = heads // kv_heads
    q, k, v = query[None], key[None], value[None]
    if group > 1:  # [1, tokens, KV heads, group, head_size], keys and values repeated by a stride of 0
        q = q.view(1, tokens, kv_heads, group, size)
        k, v = (part[:, :, :, None].expand(1, kv_tokens, kv_heads, group, size) for part in (k, v))
    out: torch.Tensor = ops.memory_efficient_attention(q, k, v, attn_bias=mask, scale=scale)
    return out.reshape(tokens, heads, size)
