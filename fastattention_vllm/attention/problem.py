"""The description of an attention problem that all kernel families share.

vLLM's metadata (``integration/cpu/backend.py``) and the public functions (``attention/functional.py``) are both
translated into it, so kernels do not depend on the origin of a problem.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """Ragged queries over paged or contiguous K and V: ``out = softmax(mask(scale * q k^T)) v``.

    ``k`` is ``key_scale * key`` and ``v`` is ``value_scale * value``. With factors, each row of ``key`` and ``value``
    is also multiplied by its own.

    With ``q_len = query_start_loc[s + 1] - query_start_loc[s]`` and ``kv_len = seq_lens[s]``, query row ``t`` of
    sequence ``s`` is at KV position ``p = kv_len - q_len + t`` (bottom-right aligned, as in flash_attn >= 2.1) and
    sees position ``j`` if ``j <= p`` (when causal) and ``p - window[0] <= j <= p + window[1]`` (-1 is unlimited).
    A row that sees nothing yields ``out = 0`` and ``lse = -inf``, or ``lse = sinks[head]`` where there are sinks.

    Tokens of ``query`` beyond ``query_start_loc[-1]`` are padding and stay untouched in ``out``.
    """

    query: torch.Tensor
    """``[num_tokens, num_heads, head_size]``, fp32, fp16 or bf16; last dimension contiguous."""
    key: torch.Tensor
    """Paged: ``[num_blocks, page_size, num_kv_heads, head_size]``, any strides but a contiguous last dimension.
    Contiguous: ``[num_kv_tokens, num_kv_heads, head_size]``. fp32, fp16, bf16, float8_e4m3fn, float8_e5m2, or int8 with
    ``key_factors``."""
    value: torch.Tensor
    """As ``key``."""
    query_start_loc: torch.Tensor
    """``[num_seqs + 1]`` int32, on the CPU; first element 0, never decreasing."""
    seq_lens: torch.Tensor
    """``[num_seqs]`` int32, on the CPU: KV tokens of each sequence."""
    scale: float
    causal: bool
    block_table: torch.Tensor | None = None
    """``[num_seqs, max_blocks]`` int32 page numbers; ``None`` when K and V are contiguous."""
    kv_start_loc: torch.Tensor | None = None
    """``[num_seqs]`` int32, on the CPU: first K/V row of each sequence; only when contiguous."""
    window: tuple[int, int] = (-1, -1)
    """Sliding window (left, right) in tokens; -1 is unlimited."""
    softcap: float = 0.0
    """``> 0``: scores become ``softcap * tanh(score / softcap)``."""
    alibi_slopes: torch.Tensor | None = None
    """``[num_heads]`` or ``[num_seqs, num_heads]`` fp32: adds ``-slope * |p - j|``."""
    sinks: torch.Tensor | None = None
    """``[num_heads]`` fp32, contiguous: for each query head, the score of one additional key with value zero, which
    every row sees. Scale, softcap, mask and slope do not apply to it. ``lse`` includes it; -inf means no sink. These
    are the learned sinks of GPT-OSS (arXiv 2508.10925); StreamingLLM (arXiv 2309.17453) explains their purpose."""

    key_scale: float = 1.0
    """The number by which an fp8 ``key`` was divided when it was stored: positive, one for the whole tensor. 1 for
    other dtypes."""
    value_scale: float = 1.0
    """As ``key_scale``, for ``value``."""
    key_factors: torch.Tensor | None = None
    """fp32, the shape of ``key`` without its last dimension, any strides: one factor for each row of an int8 ``key``.
    ``None`` for other dtypes."""
    value_factors: torch.Tensor | None = None
    """As ``key_factors``, for ``value``."""

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_heads(self) -> int:
        return self.query.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[-2]

    @property
    def head_size(self) -> int:
        return self.query.shape[2]

    @property
    def is_paged(self) -> bool:
        return self.block_table is not None

    @property
    def is_empty(self) -> bool:
        """Whether there is no query token, or no sequence has a key."""
        return int(self.query_start_loc[-1]) == 0 or not bool(self.seq_lens.any())


def no_keys(problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """The answers to queries that see no key, for kernels that must not be launched without work."""
    out = torch.zeros_like(problem.query, memory_format=torch.contiguous_format)
    lse = problem.query.new_full(problem.query.shape[:2], -math.inf, dtype=torch.float32)
    return out, lse if problem.sinks is None else lse.copy_(problem.sinks.to(lse.device))


def flash_sums(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Log-sum-exps of FlashAttention 2, which are +inf for a query that sees no key and for one whose sum is NaN.

    The first becomes -inf, the second NaN. ``out`` ``[tokens, heads, head_size]`` tells them apart: it is NaN in the
    second.
    """
    is_nan = out[: len(lse)].isnan().any(-1)
    return torch.where(lse == math.inf, torch.where(is_nan, math.nan, -math.inf).to(lse.dtype), lse)


def deliver(
    problem: AttentionProblem,
    found: torch.Tensor,
    found_lse: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the answers of real query tokens into the tensors of the caller, or return them where there are none.

    For kernels that allocate what they return. Rows of padding in ``out`` and ``lse`` stay as they are.
    """
    tokens = int(problem.query_start_loc[-1])
    if out is not None:
        out[:tokens].copy_(found[:tokens])
    if lse is not None:
        lse[:tokens].copy_(found_lse[:tokens])
    return found if out is None else out, found_lse if lse is None else lse
