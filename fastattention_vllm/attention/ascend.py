"""Attention on Ascend NPUs: torch_npu's fused attention with its compressed mask. Not yet run on hardware.

``npu_fused_infer_attention_score`` uses one triangular mask of 2048 x 2048 for causal masks and windows of any length.
This is the paper's tiling-mask with M = 1024. This module translates a problem into calls of that operator, and refuses
problems that its documentation excludes with one sentence. The limits are those of torch_npu's API reference for the
Atlas A2 (910B); ``tests/ascend/operator.py`` states them independently.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fastattention_vllm.attention.pages import write_kv as write_kv
from fastattention_vllm.attention.problem import AttentionProblem, deliver

ANY_PAGE_SIZE = False
DTYPES = (torch.float16, torch.bfloat16)
MASK_SIZE = 2048
UNLIMITED = 2**31 - 1
"""The value of ``pre_tokens`` and ``next_tokens`` for no limit."""
NO_MASK, CAUSAL, BAND = 0, 3, 4
"""Values of ``sparse_mode``. Both masks are aligned with the last query and the last key."""

TND_HEAD_SIZES = (128, 192)
TND_MAX_SEQUENCES = 4096
TND_MAX_TOKENS = 1 << 20
MAX_HEADS = 256
MAX_QUERIES_PER_KV_HEAD = 64
MAX_HEAD_SIZE = 512
MAX_ROW = 65535
"""Maximum number of elements in one token's keys, over all KV heads."""
MAX_NUMBERS = 2**31 - 1
"""Maximum number of elements in a whole cache whose pages are read in a batch layout."""


@dataclass(frozen=True)
class Call:
    """The sequences of one call of the operator, and their layout."""

    sequences: tuple[int, ...]
    layout: Literal["TND", "BSND"]
    """TND: the tokens of all sequences one after the other. BSND: a batch of sequences of equal length."""
    source: Literal["pages", "rows", "gathered"]
    """Source of keys and values: the cache in place, contiguous tensors, or a converted copy of the cache."""


def can_run(problem: AttentionProblem) -> str | None:
    """Why the operator cannot compute ``problem``, in one sentence; ``None`` if it can."""
    query, key = problem.query, problem.key
    heads, kv_heads, size = problem.num_heads, problem.num_kv_heads, problem.head_size
    lengths, starts = problem.seq_lens.tolist(), problem.query_start_loc.tolist()
    new = [end - begin for begin, end in itertools.pairwise(starts)]
    if query.dtype not in DTYPES:
        return f"query is {query.dtype}, but the NPU's attention needs float16 or bfloat16; pass --dtype bfloat16."
    if problem.key_factors is not None or problem.value_factors is not None:
        return "keys or values have a factor for each row, but the fused operator has one for the whole cache."
    if key.dtype not in (query.dtype, torch.int8) or problem.value.dtype != key.dtype:
        return f"keys are {key.dtype} and values {problem.value.dtype}, but both must be {query.dtype} or int8."
    for name, asked in (
        ("a soft cap", problem.softcap > 0),
        ("ALiBi", problem.alibi_slopes is not None),
        ("attention sinks", problem.sinks is not None),
    ):
        if asked:
            return f"npu_fused_infer_attention_score does not support {name}; serve another model."
    if heads % kv_heads or heads // kv_heads > MAX_QUERIES_PER_KV_HEAD or heads > MAX_HEADS:
        return (
            f"there are {heads} query heads and {kv_heads} KV heads, but every KV head must have the same number of "
            f"query heads, at most {MAX_QUERIES_PER_KV_HEAD}, and there may be at most {MAX_HEADS} query heads."
        )
    multiple = 32 if key.dtype == torch.int8 else 16
    if size % multiple or size > MAX_HEAD_SIZE:
        return f"the head size is {size}, but it must be a multiple of {multiple} up to {MAX_HEAD_SIZE}."
    masked = problem.causal or max(problem.window) >= 0
    wrong = [(q, kv) for q, kv in zip(new, lengths, strict=True) if q > kv]
    if masked and wrong:
        return f"a sequence has {wrong[0][0]} query tokens but only {wrong[0][1]} keys."
    if size in TND_HEAD_SIZES and (len(lengths) > TND_MAX_SEQUENCES or starts[-1] > TND_MAX_TOKENS):
        return (
            f"the batch has {len(lengths)} sequences and {starts[-1]} tokens, but the limits are {TND_MAX_SEQUENCES} "
            f"sequences and {TND_MAX_TOKENS} tokens; lower --max-num-seqs or --max-num-batched-tokens."
        )
    return _wrong_pages(problem, max(new, default=0)) if problem.is_paged else None


def _wrong_pages(problem: AttentionProblem, longest: int) -> str | None:
    key, page = problem.key, problem.key.shape[1]
    if not (key.is_contiguous() and problem.value.is_contiguous()):
        return "keys and values must each be one contiguous cache, as vllm-ascend allocates them."
    if key.shape[2] * key.shape[3] > MAX_ROW:
        return f"{key.shape[2]} KV heads of size {key.shape[3]} exceed the limit of {MAX_ROW} numbers per token."
    quantised = key.dtype == torch.int8
    if problem.head_size not in TND_HEAD_SIZES or quantised:
        if key.numel() > MAX_NUMBERS:
            return f"the cache of a layer has {key.numel()} numbers, but at most {MAX_NUMBERS} can be addressed."
        if longest > 1 and not quantised and (page % 128 or page > 512):
            return (
                f"the page size is {page} tokens, but head size {problem.head_size} needs 128, 256 or 512; pass "
                "--block-size 128."
            )
    multiple = 32 if quantised else 16
    if page % multiple or page > 1024:
        return (
            f"the page size is {page} tokens, but must be a multiple of {multiple} up to 1024; pass --block-size 128."
        )
    return None


def plan(problem: AttentionProblem) -> tuple[Call, ...]:
    """The calls that compute ``problem``, without sequences that have no query token.

    If the operator supports ragged sequences of this head size, one call computes all. Otherwise one call computes all
    sequences with a single query token, and each longer sequence has its own call, so no padding is computed. An int8
    cache is read in place for single tokens. For longer sequences, which the operator does not support, it is
    converted first.
    """
    lengths = torch.diff(problem.query_start_loc).tolist()
    one = tuple(s for s, count in enumerate(lengths) if count == 1)
    more = tuple(s for s, count in enumerate(lengths) if count > 1)
    ragged = problem.head_size in TND_HEAD_SIZES
    source: Literal["pages", "rows"] = "pages" if problem.is_paged else "rows"
    if problem.key.dtype == torch.int8:
        alone = [Call(one, "BSND", "pages")] if one and problem.is_paged else []
        rest = more if alone else tuple(sorted(one + more))
        longer = [rest] if ragged and rest else [(s,) for s in rest]
        return (*alone, *(Call(group, "TND" if ragged else "BSND", "gathered") for group in longer))
    if ragged:
        every = tuple(sorted(one + more))
        return (Call(every, "TND", source),) if every else ()
    singles = [one] if one and problem.is_paged else [(s,) for s in one]
    return tuple(Call(group, "BSND", source) for group in [*singles, *((s,) for s in more)])


def arguments(problem: AttentionProblem, call: Call, lse: bool = False) -> dict[str, Any]:
    """The operator's arguments for ``call``."""
    starts, lengths = problem.query_start_loc.tolist(), problem.seq_lens.tolist()
    new = [starts[s + 1] - starts[s] for s in call.sequences]
    kept = [lengths[s] for s in call.sequences]
    query = problem.query[rows_of(problem, call)].contiguous()
    found: dict[str, Any] = {
        "num_heads": problem.num_heads,
        "num_key_value_heads": problem.num_kv_heads,
        "scale": problem.scale,
        "input_layout": call.layout,
        "softmax_lse_flag": lse,
        **_mask(problem, query.device),
    }
    if call.layout == "TND":
        found |= {"query": query, "actual_seq_lengths": list(itertools.accumulate(new))}
    else:
        found |= {"query": query.unflatten(0, (len(new), new[0])), "actual_seq_lengths": new}
        if new[0] == 1:  # the operator ignores sparse_mode, so the keys are limited to the window
            found |= {"sparse_mode": NO_MASK, "atten_mask": None, "pre_tokens": UNLIMITED, "next_tokens": UNLIMITED}
            if problem.window[0] >= 0:
                return found | _last_keys(problem, call, kept)
    if call.source == "pages":
        assert problem.block_table is not None
        found |= _paged(problem, problem.block_table[_rows([(s, s + 1) for s in call.sequences])], kept)
    else:
        key, value = (_dense(problem, cache, call) for cache in (problem.key, problem.value))
        if call.layout == "TND":
            found |= {"key": key, "value": value, "actual_seq_lengths_kv": list(itertools.accumulate(kept))}
        else:
            found |= {"key": key[None], "value": value[None], "actual_seq_lengths_kv": kept}
    return found


def run(
    problem: AttentionProblem,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute ``problem`` on its query's NPU, on torch's current stream.

    ``out``: ``[num_tokens, num_heads, head_size]`` in the query's dtype; ``lse``: ``[num_tokens, num_heads]`` fp32.
    An int8 cache holds keys divided by ``key_scale`` and values divided by ``value_scale``.

    Raises ``ValueError`` for what :func:`can_run` names.
    """
    reason = can_run(problem)
    if reason is not None:
        raise ValueError(reason)
    with_lse = return_lse or lse is not None
    found, sums = _run(problem, with_lse)
    if sums is None:
        sums = found.new_empty(0)
    out, lse = deliver(problem, found, sums, out, lse)
    return out, lse if return_lse else None


def _run(problem: AttentionProblem, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    calls = plan(problem)
    if len(calls) == 1 and rows_of(problem, calls[0]) == slice(0, len(problem.query)):
        return _compute(problem, calls[0], return_lse)  # the usual case, without a copy
    out = torch.empty_like(problem.query, memory_format=torch.contiguous_format)
    lse = problem.query.new_empty(problem.query.shape[:2], dtype=torch.float32) if return_lse else None
    for call in calls:
        rows = rows_of(problem, call)
        out[rows], sums = _compute(problem, call, return_lse)
        if lse is not None and sums is not None:
            lse[rows] = sums
    return out, lse


def _compute(problem: AttentionProblem, call: Call, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Outputs and log-sum-exps of the call's query tokens."""
    out, lse = operator()(**arguments(problem, call, return_lse))
    out = out.reshape(-1, problem.num_heads, problem.head_size)
    if not return_lse:
        return out, None
    # [T, N, 1], or [B, N, S, 1]
    return out, lse[..., 0] if call.layout == "TND" else lse[..., 0].transpose(1, 2).flatten(0, 1)


def operator() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    import torch_npu

    found: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch_npu.npu_fused_infer_attention_score
    return found


@functools.cache
def compressed_mask(device: torch.device) -> torch.Tensor:
    """``[2048, 2048]`` int8, 1 for hidden keys: 4 MiB, for sequences of any length."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8, device=device).triu(1)


def rows_of(problem: AttentionProblem, call: Call) -> slice | list[int]:
    """The query tokens of ``call``, in its order."""
    starts = problem.query_start_loc.tolist()
    return _rows([(starts[s], starts[s + 1]) for s in call.sequences])


def _mask(problem: AttentionProblem, device: torch.device) -> dict[str, Any]:
    before, after = problem.window
    if problem.causal:
        after = 0
    if before < 0 and after < 0:
        return {"sparse_mode": NO_MASK}
    if before < 0 and after == 0:
        return {"sparse_mode": CAUSAL, "atten_mask": compressed_mask(device)}
    # The band includes both ends: a query sees its own key and `pre_tokens` keys before it.
    return {
        "sparse_mode": BAND,
        "atten_mask": compressed_mask(device),
        "pre_tokens": UNLIMITED if before < 0 else before,
        "next_tokens": UNLIMITED if after < 0 else after,
    }


def _paged(problem: AttentionProblem, table: torch.Tensor, kept: Sequence[int]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "key": problem.key.flatten(2),
        "value": problem.value.flatten(2),
        "block_table": table.contiguous(),
        "block_size": problem.key.shape[1],
        "actual_seq_lengths_kv": list(kept),
    }
    if problem.key.dtype == torch.int8:
        shape = (1, problem.num_kv_heads, problem.head_size)  # one factor per channel, mode 0
        for name, factor in (("key", problem.key_scale), ("value", problem.value_scale)):
            found[f"{name}_antiquant_scale"] = problem.query.new_full(shape, factor)
    return found


def _last_keys(problem: AttentionProblem, call: Call, kept: Sequence[int]) -> dict[str, Any]:
    """Keys and values of sequences with one query token and a window: the pages from the first visible key on, and a
    mask for the keys before it in its page."""
    first = [max(0, length - 1 - problem.window[0]) for length in kept]
    if call.source != "pages":
        assert len(first) == 1
        key, value = (_dense(problem, cache, call)[first[0] :][None] for cache in (problem.key, problem.value))
        return {"key": key, "value": value, "actual_seq_lengths_kv": [kept[0] - first[0]]}
    assert problem.block_table is not None
    page = problem.key.shape[1]
    skipped = [token // page for token in first]
    visible = [length - pages * page for length, pages in zip(kept, skipped, strict=True)]
    width = -(-max(visible) // page)
    table = problem.block_table
    column = torch.tensor(skipped, device=table.device)[:, None] + torch.arange(width, device=table.device)
    column = column.clamp(max=table.shape[1] - 1)
    moved = table[_rows([(s, s + 1) for s in call.sequences])].gather(1, column)
    hidden = torch.tensor([token - pages * page for token, pages in zip(first, skipped, strict=True)])
    mask = torch.arange(width * page)[None] < hidden[:, None]
    return _paged(problem, moved, visible) | {"atten_mask": mask.to(problem.query.device)}


def _dense(problem: AttentionProblem, cache: torch.Tensor, call: Call) -> torch.Tensor:
    """``[tokens, num_kv_heads, head_size]`` of the call's sequences, in the query's dtype."""
    lengths = problem.seq_lens.tolist()
    if problem.block_table is None:
        assert problem.kv_start_loc is not None
        first = problem.kv_start_loc.tolist()
        rows = cache[_rows([(first[s], first[s] + lengths[s]) for s in call.sequences])]
    else:
        page = cache.shape[1]
        parts = []
        for s in call.sequences:
            pages = problem.block_table[s, : -(-lengths[s] // page)].long()
            parts.append(cache[pages].flatten(0, 1)[: lengths[s]])
        rows = torch.cat(parts)
    if cache.dtype != torch.int8:
        return rows.contiguous()
    factor = problem.key_scale if cache is problem.key else problem.value_scale
    return (rows.float() * factor).to(problem.query.dtype)


def _rows(spans: Sequence[tuple[int, int]]) -> slice | list[int]:
    """All of ``spans``, one after the other. A slice if they are adjacent, to avoid copying a list to the device."""
    if all(before[1] == after[0] for before, after in itertools.pairwise(spans)):
        return slice(spans[0][0], spans[-1][1])
    return [row for begin, end in spans for row in range(begin, end)]
