"""torch_npu's ``npu_fused_infer_attention_score`` on CPUs, in float64, written from its API reference for the Atlas A2.

Calls that the reference excludes raise an AssertionError here. This keeps our calls within the reference without an
NPU. The limits are deliberately restated instead of being imported from ``fastattention_vllm.attention.ascend``.
"""

from __future__ import annotations

import math
from typing import Any

import torch

INT_MAX = 2**31 - 1
HALVES = (torch.float16, torch.bfloat16)
calls: list[dict[str, Any]] = []
"""The arguments of each call, by name. Tests clear it."""


def npu_fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: torch.Tensor | None = None,
    key_antiquant_scale: torch.Tensor | None = None,
    value_antiquant_scale: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = INT_MAX,
    next_tokens: int = INT_MAX,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    calls.append({"layout": input_layout, "sparse_mode": sparse_mode, "paged": block_table is not None})
    used = {name: given for name, given in others.items() if given not in (None, 0, False)}
    assert not used, f"not supported by this stand-in: {used}"
    assert query.dtype in HALVES, query.dtype
    assert query.is_contiguous()
    assert key.is_contiguous()
    assert value.is_contiguous()
    assert key.dtype == value.dtype
    assert key.dtype in (query.dtype, torch.int8)
    kv_heads = num_key_value_heads or num_heads
    assert num_heads % kv_heads == 0
    assert num_heads // kv_heads <= 64
    assert num_heads <= 256
    paged, quantised = block_table is not None, key.dtype == torch.int8
    if input_layout == "TND":
        assert actual_seq_lengths is not None
        assert actual_seq_lengths_kv is not None
        tokens, heads, size = query.shape
        assert size in (128, 192), f"TND takes head sizes 128 and 192, not {size}"
        assert tokens <= 1 << 20
        assert 0 < len(actual_seq_lengths) <= 4096
        assert len(actual_seq_lengths) == len(actual_seq_lengths_kv)
        for ends in [actual_seq_lengths] if paged else [actual_seq_lengths, actual_seq_lengths_kv]:
            assert list(ends) == sorted(ends), f"lengths must be cumulative sums: {ends}"
            assert ends[0] >= 0
        assert actual_seq_lengths[-1] == tokens, "the last sum must be the number of query tokens"
        assert not quantised, "TND does not take an int8 cache"
        spans = _spans(actual_seq_lengths)
        queries = [query[begin:end] for begin, end in spans]
    else:
        assert input_layout in ("BSND", "BNSD")
        batched = query if input_layout == "BSND" else query.transpose(1, 2)
        batch, longest, heads, size = batched.shape
        assert size <= 512
        assert size % (32 if quantised else 16) == 0
        counts = [longest] * batch if longest == 1 or actual_seq_lengths is None else list(actual_seq_lengths)
        assert len(counts) == batch
        assert max(counts) <= longest
        queries = [batched[b, : counts[b]] for b in range(batch)]
        if quantised and paged:
            assert longest == 1, "a paged int8 cache takes one query token per sequence"
    assert heads == num_heads
    single = input_layout != "TND" and longest == 1
    keys, values = _keys(
        key, value, block_table, block_size, actual_seq_lengths_kv, kv_heads, size, len(queries), input_layout, single
    )
    if quantised:
        keys = _scaled(keys, key_antiquant_scale, query.dtype, kv_heads, size)
        values = _scaled(values, value_antiquant_scale, query.dtype, kv_heads, size)
    else:
        assert key_antiquant_scale is None
        assert value_antiquant_scale is None
    outs, sums = [], []
    for index, (rows, own_keys, own_values) in enumerate(zip(queries, keys, values, strict=True)):
        hidden = _hidden(
            len(rows), len(own_keys), index, atten_mask, 0 if single else sparse_mode, pre_tokens, next_tokens
        )
        group = num_heads // kv_heads
        score = torch.einsum("qhd,khd->hqk", rows.double(), own_keys.double().repeat_interleave(group, 1)) * scale
        score = score.masked_fill(hidden, -math.inf)
        weight = score.softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weight, own_values.double().repeat_interleave(group, 1)))
        sums.append(score.logsumexp(-1).T.float())
    if input_layout == "TND":
        out, lse = torch.cat(outs), torch.cat(sums)[..., None]
    else:
        room = query.new_zeros(batch, longest, num_heads, size, dtype=torch.float64)
        lse_room = query.new_zeros(batch, longest, num_heads, dtype=torch.float32)
        for index, (one, its) in enumerate(zip(outs, sums, strict=True)):
            room[index, : len(one)], lse_room[index, : len(one)] = one, its
        out = room if input_layout == "BSND" else room.transpose(1, 2)
        lse = lse_room.transpose(1, 2)[..., None]
    return out.to(query.dtype).contiguous(), lse.contiguous() if softmax_lse_flag else torch.zeros(1)


def _spans(ends: list[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _keys(
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor | None,
    page: int,
    lengths: list[int] | None,
    kv_heads: int,
    size: int,
    batch: int,
    layout: str,
    single: bool,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One tensor ``[tokens, kv_heads, size]`` per sequence."""
    if table is None:
        if layout == "TND":
            assert lengths is not None
            assert lengths[-1] == len(key)
            spans = _spans(lengths)
            return [key[begin:end] for begin, end in spans], [value[begin:end] for begin, end in spans]
        assert len(key) == batch
        if layout == "BNSD":
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        ends = [key.shape[1]] * batch if lengths is None else list(lengths)
        return [key[b, : ends[b]] for b in range(batch)], [value[b, : ends[b]] for b in range(batch)]
    assert lengths is not None
    assert len(lengths) == batch
    assert table.dtype == torch.int32
    assert table.dim() == 2
    assert len(table) == batch
    assert table.shape[1] * page >= max(lengths)
    if key.dtype == torch.int8:
        assert page % 32 == 0
        assert page <= 1024
    elif layout == "TND" or single:
        assert page % 16 == 0
        assert page <= 1024
    else:
        assert page % 128 == 0
        assert page <= 512
    if layout != "TND":
        assert key.numel() < 2**31
    if key.dim() == 5:  # NZ: [pages, kv_heads, size / 32, page, 32]
        assert key.dtype == torch.int8
        assert key.shape[1:] == (kv_heads, size // 32, page, 32)
        key, value = (cache.permute(0, 3, 1, 2, 4).reshape(len(cache), page, -1) for cache in (key, value))
    assert key.shape[1:] == (page, kv_heads * size), key.shape
    assert kv_heads * size <= 65535
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for sequence, length in enumerate(lengths):
        pages = table[sequence, : -(-length // page)].long()
        assert (pages >= 0).all()
        for cache, rows in zip((key, value), found, strict=True):
            rows.append(cache[pages].reshape(-1, kv_heads, size)[:length])
    return found


def _scaled(
    rows: list[torch.Tensor], factor: torch.Tensor | None, dtype: torch.dtype, kv_heads: int, size: int
) -> list[torch.Tensor]:
    """Scale with one factor per channel (mode 0), the only mode supported here."""
    assert factor is not None
    assert factor.dtype == dtype, f"the factors are {factor.dtype} but must have the query's dtype, {dtype}"
    assert factor.numel() == kv_heads * size, factor.shape
    return [one.double() * factor.double().reshape(kv_heads, size) for one in rows]


def _hidden(
    queries: int, keys: int, sequence: int, mask: torch.Tensor | None, mode: int, before: int, after: int
) -> torch.Tensor:
    own = torch.arange(queries)[:, None] + keys - queries
    position = torch.arange(keys)[None]
    assert mode in (0, 3, 4), mode
    if mode == 0:
        if mask is None:
            return torch.zeros(queries, keys, dtype=torch.bool)
        assert queries == 1, "a whole mask is only supported for one query token"
        assert mask.dtype in (torch.bool, torch.int8, torch.uint8)
        return mask.reshape(len(mask), -1)[sequence, :keys].bool()[None]
    assert mask is not None
    assert mask.shape == (2048, 2048), mask.shape
    assert mask.dtype in (torch.bool, torch.int8, torch.uint8)
    assert bool((mask.bool() == torch.ones(2048, 2048, dtype=torch.bool).triu(1)).all()), "must be triangular"
    assert keys >= queries
    if mode == 3:
        return position > own
    # As in Ascend's own operator tests: triu(next_tokens + 1) and tril(-pre_tokens - 1) are hidden.
    return (position > own + after) | (position < own - before)
