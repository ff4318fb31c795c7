"""Attention on NVIDIA GPUs of compute capability 8.0 and newer, with the FlashAttention kernels that vLLM includes.

These kernels need no replacement on these GPUs. This package adds only the placement of the KV cache. This is the only
module of ``attention`` that imports vLLM.
"""

from __future__ import annotations

import functools
import itertools

import torch

from fastattention_vllm.attention.pages import rows
from fastattention_vllm.attention.problem import AttentionProblem, deliver, flash_sums, no_keys

ANY_PAGE_SIZE = False
DEVICE = "cuda"
DTYPES = (torch.float16, torch.bfloat16)
HEAD_SIZE_MULTIPLE = 8
MAX_HEAD_SIZE = 256
"""Of FlashAttention 2 and 3."""


def can_run(problem: AttentionProblem) -> str | None:
    """Why these kernels cannot compute ``problem``, in one sentence; ``None`` if they can."""
    query, size = problem.query, problem.query.shape[-1]
    if query.device.type != DEVICE:
        return f"query is on {query.device}, but FlashAttention needs it on a GPU."
    if query.dtype not in DTYPES or {problem.key.dtype, problem.value.dtype} != {query.dtype}:
        return (
            f"query is {query.dtype}, key {problem.key.dtype} and value {problem.value.dtype}, but FlashAttention "
            "needs all three in float16 or all three in bfloat16."
        )
    if problem.alibi_slopes is not None:
        return "vLLM's FlashAttention does not support alibi_slopes here; use the CPU."
    if size % HEAD_SIZE_MULTIPLE:
        return f"head_size is {size}, but FlashAttention supports multiples of {HEAD_SIZE_MULTIPLE}."
    if size > MAX_HEAD_SIZE and version(size) < 4:
        return f"head_size is {size}, but FlashAttention {version(size)} supports up to {MAX_HEAD_SIZE}."
    if problem.sinks is not None and query.dtype != torch.bfloat16:
        return f"sinks need a bfloat16 query, not {query.dtype}."
    if problem.sinks is not None and version(size) < 3:
        return "FlashAttention 2, which vLLM chooses on this GPU, does not support sinks; compute capability 9.0 does."
    return None


def run(
    problem: AttentionProblem,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute ``problem`` on its query's GPU, on torch's current stream.

    ``out``: ``[num_tokens, num_heads, head_size]`` in the query's dtype; ``lse``: ``[num_tokens, num_heads]`` fp32.

    Raises ``ValueError`` for what :func:`can_run` names.
    """
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    reason = can_run(problem)
    if reason is not None:
        raise ValueError(reason)
    if problem.is_empty:
        out, lse = deliver(problem, *no_keys(problem), out, lse)
        return out, lse if return_lse else None
    device, lengths = problem.query.device, tuple(problem.seq_lens.tolist())
    starts = tuple(problem.query_start_loc.tolist())
    new = [end - begin for begin, end in itertools.pairwise(starts)]
    key, value = problem.key, problem.value
    if problem.block_table is None:
        assert problem.kv_start_loc is not None
        key, value = rows(key, value, problem.kv_start_loc.tolist(), lengths)
        keys = {"cu_seqlens_k": _int32(device, (0, *itertools.accumulate(lengths)))}
    else:
        keys = {"seqused_k": _int32(device, lengths), "block_table": problem.block_table.to(device)}
    found, by_head = flash_attn_varlen_func(
        q=problem.query,
        k=key,
        v=value,
        cu_seqlens_q=_int32(device, starts),
        max_seqlen_q=max(new),
        max_seqlen_k=max(lengths),
        softmax_scale=problem.scale,
        causal=problem.causal,
        window_size=list(problem.window),
        softcap=problem.softcap,
        s_aux=None if problem.sinks is None else problem.sinks.to(torch.bfloat16),  # the only dtype it takes
        return_softmax_lse=True,
        fa_version=version(problem.head_size),
        **keys,
    )
    sums = by_head.transpose(0, 1)
    if any(count > keys_of for count, keys_of in zip(new, lengths, strict=True)):  # a query may see no key
        sums = flash_sums(found, sums)
    out, lse = deliver(problem, found, sums, out, lse)
    return out, lse if return_lse else None


def run_in_graph(problem: AttentionProblem, max_seq_len: int, max_query_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` and ``lse`` without waiting for the GPU, where lengths and block table are.

    A sequence of length 0 gets anything, and so do rows after the last sequence. ``max_seq_len``: none is longer.
    ``max_query_len``: none has more queries.
    """
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    reason = can_run(problem)
    if reason is not None:
        raise ValueError(reason)
    out, lse = flash_attn_varlen_func(
        q=problem.query,
        k=problem.key,
        v=problem.value,
        cu_seqlens_q=problem.query_start_loc,
        max_seqlen_q=max_query_len,
        seqused_k=problem.seq_lens,
        max_seqlen_k=max_seq_len,
        block_table=problem.block_table,
        softmax_scale=problem.scale,
        causal=problem.causal,
        window_size=list(problem.window),
        softcap=problem.softcap,
        return_softmax_lse=True,
        fa_version=version(problem.head_size),
    )
    return out, lse.transpose(0, 1)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Scatter ``key`` and ``value`` ``[num_tokens, num_kv_heads, head_size]`` into pages that the GPU can address.

    ``key_cache``, ``value_cache``: ``[num_blocks, page_size, num_kv_heads, head_size]`` of the same dtype. The last
    dimension must be contiguous, other strides are free. Device memory, or pinned host memory mapped to the device.
    """
    from vllm.v1.attention.backends.fa_utils import reshape_and_cache_flash

    assert key_scale == value_scale == 1.0
    one = _one(key.device)
    reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, "auto", one, one)


@functools.lru_cache(maxsize=1024)
def _int32(device: torch.device, numbers: tuple[int, ...]) -> torch.Tensor:
    """Cached, because all layers of a step need the same few tensors."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@functools.cache
def version(head_size: int) -> int:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    found = get_flash_attn_version(head_size=head_size)
    assert found is not None
    return int(found)


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones(1, dtype=torch.float32, device=device)
