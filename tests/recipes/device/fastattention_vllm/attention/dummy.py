"""Attention on the dummy device of tests/test_recipes.py: torch's own operator, one sequence at a time.

Its tensors are on the host. Soft caps, ALiBi, sinks and fp8 are not supported, so they are refused.
"""

from __future__ import annotations

import torch

from fastattention_vllm.attention.problem import AttentionProblem

ANY_PAGE_SIZE = True
DTYPES = (torch.float32, torch.float16)


def can_run(problem: AttentionProblem) -> str | None:
    """Why these kernels cannot compute ``problem``, in one sentence; ``None`` if they can."""
    for name, asked in (
        ("a soft cap", problem.softcap > 0),
        ("ALiBi", problem.alibi_slopes is not None),
        ("attention sinks", problem.sinks is not None),
        ("scaled keys or values", (problem.key_scale, problem.value_scale) != (1.0, 1.0)),
        ("int8 keys", problem.key_factors is not None),
        ("int8 values", problem.value_factors is not None),
    ):
        if asked:
            return f"the dummy kernels do not compute {name}."
    if problem.query.dtype not in DTYPES or not (problem.key.dtype == problem.value.dtype == problem.query.dtype):
        return (
            f"query is {problem.query.dtype}, key {problem.key.dtype} and value {problem.value.dtype}, the dummy "
            "kernels take float32 or float16 for all three."
        )
    return None


def run(
    problem: AttentionProblem,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute ``problem`` as :class:`~fastattention_vllm.attention.kernels.Kernels` specifies."""
    reason = can_run(problem)
    if reason is not None:
        raise ValueError(reason)
    if out is None:
        out = torch.zeros_like(problem.query, memory_format=torch.contiguous_format)
    if lse is None:
        lse = torch.zeros(out.shape[:2], dtype=torch.float32, device=out.device)
    starts, group = problem.query_start_loc.tolist(), problem.num_heads // problem.num_kv_heads
    for sequence, length in enumerate(problem.seq_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        key, value = (_keys(problem, cache, sequence, length) for cache in (problem.key, problem.value))
        key, value = (tensor.repeat_interleave(group, 1).float() for tensor in (key, value))
        scores = torch.einsum("qhd,khd->qhk", problem.query[rows].float(), key) * problem.scale
        hidden = ~_visible(problem, rows.stop - rows.start, length)
        scores.masked_fill_(hidden[:, None], -torch.inf)
        lse[rows] = scores.logsumexp(-1)
        weights = scores.softmax(-1).nan_to_num(0.0)  # a row that sees no key has no weights
        value = value.masked_fill(hidden.all(0)[:, None, None], 0.0)
        out[rows] = torch.einsum("qhk,khd->qhd", weights, value).to(out.dtype)
    return out, lse if return_lse else None


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Store new rows in the pages. Tokens with a negative slot are skipped."""
    assert key_scale == value_scale == 1.0
    stored = slot_mapping >= 0
    slots, page = slot_mapping[stored], key_cache.shape[1]
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache[slots // page, slots % page] = rows[: len(slot_mapping)][stored].to(cache.dtype)


def _keys(problem: AttentionProblem, cache: torch.Tensor, sequence: int, length: int) -> torch.Tensor:
    """One sequence's keys or values, ``[length, num_kv_heads, head_size]``."""
    if problem.block_table is None:
        assert problem.kv_start_loc is not None
        first = int(problem.kv_start_loc[sequence])
        return cache[first : first + length]
    page, position = cache.shape[1], torch.arange(length)
    return cache[problem.block_table[sequence, position // page].long(), position % page]


def _visible(problem: AttentionProblem, new: int, length: int) -> torch.Tensor:
    """Which keys each query token sees, ``[new, length]``."""
    own = torch.arange(length - new, length)[:, None]
    position = torch.arange(length)[None]
    left, right = problem.window
    right = 0 if problem.causal else right
    seen = torch.ones(new, length, dtype=torch.bool)
    if left >= 0:
        seen &= position >= own - left
    if right >= 0:
        seen &= position <= own + right
    return seen
