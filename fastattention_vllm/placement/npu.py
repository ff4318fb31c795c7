"""Host layers on an Ascend NPU: copies to and from host memory, and the NPU's attention. Not yet run on hardware.

An NPU's kernels cannot address host memory as a GPU's kernels do, so data is copied. If the host side of a copy is not
contiguous, torch_npu finishes the copy on the host, possibly before the data has arrived. So everything is first
brought into the order of the host's pages on the device.

This module implements ``Device`` (:mod:`~fastattention_vllm.placement.host_attention`) for these layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from fastattention_vllm.attention import ascend
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.placement.link import StreamLink, copy_runs, runs_of


class NpuLink(StreamLink):
    """One NPU, through torch_npu's streams."""

    def visible(self, cache: torch.Tensor) -> torch.Tensor:
        """The host tensor itself, because :func:`write_kv` copies to it."""
        return cache

    def _plan(self, blocks: torch.Tensor) -> list[tuple[int, int, int]]:
        return runs_of(blocks)

    def _copy(self, cache: torch.Tensor, target: torch.Tensor, plan: list[tuple[int, int, int]]) -> None:
        copy_runs(cache, target, plan)


def run(problem: AttentionProblem, *, return_lse: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Like ``attention.ascend.run``, and also for one sequence over staged host pages with K and V side by side.

    Over pages, there may be more query tokens than keys; all of them see the last key.
    """
    if problem.block_table is None:
        return ascend.run(problem, return_lse=return_lse)
    problem = _in_rows(problem)
    new, tokens, reach = len(problem.query), int(problem.seq_lens[0]), problem.window[0]
    all_seen = new if reach < 0 else min(new, max(0, new - tokens + reach + 1))
    if all_seen == 0:
        return ascend.run(problem, return_lse=return_lse)
    # The operator aligns its band with the last key and the last query, so it cannot express queries before all keys.
    parts = [_of_rows(problem, 0, all_seen, (-1, -1))]
    if all_seen < new:
        parts.append(_of_rows(problem, all_seen, new, (reach, -1)))
    outs, sums = zip(*(ascend.run(part, return_lse=True) for part in parts), strict=True)
    return (outs[0], sums[0]) if len(parts) == 1 else (torch.cat(outs), torch.cat(sums))


def _in_rows(problem: AttentionProblem) -> AttentionProblem:
    """Copy the sequence's pages to contiguous keys and values, each ``[tokens, num_kv_heads, head_size]``."""
    assert problem.block_table is not None
    assert len(problem.seq_lens) == 1
    tokens, page = int(problem.seq_lens[0]), problem.key.shape[1]
    pages = problem.block_table[0, : -(-tokens // page)].long()
    key, value = (cache[pages].flatten(0, 1)[:tokens].contiguous() for cache in (problem.key, problem.value))
    start = torch.zeros(1, dtype=torch.int32)
    return replace(problem, key=key, value=value, block_table=None, kv_start_loc=start)


def _of_rows(problem: AttentionProblem, begin: int, end: int, window: tuple[int, int]) -> AttentionProblem:
    starts = torch.tensor([0, end - begin], dtype=torch.int32)
    return replace(problem, query=problem.query[begin:end], query_start_loc=starts, window=window)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Start copying new keys and values into a host layer's pages, on the current stream.

    ``key``, ``value``: ``[tokens, num_kv_heads, head_size]`` on the NPU, of one sequence in order. ``key_cache``,
    ``value_cache``: the two halves of host memory ``[num_blocks, num_kv_heads, page, K | V]``, each viewed as
    ``[num_blocks, page, num_kv_heads, head_size]``. ``slot_mapping``: int64 ``[tokens]`` on the host; tokens with
    negative slots are not stored. Whole pages take one copy per run of neighbouring pages, partial pages one per head.
    """
    assert (key_scale, value_scale) == (1.0, 1.0), "the NPU's host layers hold what the model computes"
    pages = _side_by_side(key_cache, value_cache)
    rows = torch.cat([key, value], dim=-1).to(pages.dtype)
    page = pages.shape[2]
    for (stored, whole), pieces in itertools.groupby(_pieces(slot_mapping, page), lambda piece: piece.kind(page)):
        group = list(pieces)
        if not stored:
            continue
        if whole:
            tokens = rows[group[0].begin : group[-1].end]
            ordered = tokens.unflatten(0, (-1, page)).transpose(1, 2).contiguous()
            for begin, first, count in runs_of(torch.tensor([piece.block for piece in group])):
                pages[first : first + count].copy_(ordered[begin : begin + count], non_blocking=True)
            continue
        for piece in group:
            by_head = rows[piece.begin : piece.end].transpose(0, 1).contiguous()
            target = pages[piece.block, :, piece.offset : piece.offset + piece.end - piece.begin]
            for head, its_rows in zip(target, by_head, strict=True):
                head.copy_(its_rows, non_blocking=True)


@dataclass(frozen=True)
class Piece:
    """Tokens ``begin`` to ``end`` of a batch, which belong in ``block`` from ``offset`` on (negative: nowhere)."""

    begin: int
    end: int
    block: int
    offset: int

    def kind(self, page: int) -> tuple[bool, bool]:
        """Whether the piece is stored, and whether it is a whole page."""
        return self.block >= 0, self.end - self.begin == page


def _pieces(slots: torch.Tensor, page: int) -> Iterator[Piece]:
    """The pieces of a batch, in order."""
    breaks = (torch.diff(slots) != 1) | (slots[1:] % page == 0)
    starts = [0, *(breaks.nonzero().flatten() + 1).tolist()]
    firsts = slots[starts].tolist()
    for begin, end, slot in zip(starts, [*starts[1:], len(slots)], firsts, strict=True):
        yield Piece(begin, end, slot // page, slot % page)


def _side_by_side(key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
    """The cache ``[num_blocks, num_kv_heads, page, K | V]`` of which these are the halves."""
    blocks, page, heads, size = key_cache.shape
    stride = key_cache.stride()
    behind = value_cache.data_ptr() - key_cache.data_ptr() == size * key_cache.element_size()
    assert behind, "keys and values do not lie side by side"
    assert stride == value_cache.stride() == (heads * page * 2 * size, 2 * size, page * 2 * size, 1)
    return key_cache.as_strided((blocks, heads, page, 2 * size), (stride[0], stride[2], stride[1], 1))
