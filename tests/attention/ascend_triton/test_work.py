"""The division of a step among programs: every query token once, every page once, and tiles in a good order."""

from __future__ import annotations

import heapq

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.attention.ascend_triton.device_work import on_device
from fastattention_vllm.attention.ascend_triton.masks import PAGE
from fastattention_vllm.attention.ascend_triton.specializations import DECODE_ROWS
from fastattention_vllm.attention.ascend_triton.work import (
    CORES,
    MAX_DECODE_TOKENS,
    MERGE_PAGES,
    START_PAGES,
    divide,
    pages_per_program,
)

ROWS = 128


@given(
    st.lists(
        st.tuples(st.one_of(st.integers(0, 9), st.integers(10, 700)), st.integers(0, 5000)), min_size=1, max_size=9
    ),
    st.sampled_from([(1, 1), (8, 2), (16, 1), (64, 1), (64, 8)]),
    st.booleans(),
)
def test_every_token_and_every_page_is_computed_once(
    sequences: list[tuple[int, int]], heads: tuple[int, int], causal: bool
) -> None:
    new = [count for count, _ in sequences]
    kept = [count + context for count, context in sequences]
    group = heads[0] // heads[1]
    work = divide(new, kept, heads=heads[0], kv_heads=heads[1], tile_rows=ROWS, causal=causal)
    done = {sequence: -(-new[sequence] // ROWS) for sequence, _ in work.tiles}
    assert sorted(work.tiles) == [(sequence, ROWS * n) for sequence in sorted(done) for n in range(done[sequence])]
    for decoding in work.decodings:
        assert 1 <= decoding.tokens <= (MAX_DECODE_TOKENS if causal else 1)
        assert decoding.tokens * group <= decoding.rows
        assert decoding.rows in DECODE_ROWS
        for sequence in decoding.sequences:
            assert new[sequence] == decoding.tokens
            assert sequence not in done
            done[sequence] = 1
            assert decoding.splits * decoding.pages * PAGE >= kept[sequence]
    assert sorted(done) == [sequence for sequence, count in enumerate(new) if count]


def test_long_tiles_come_first() -> None:
    work = divide([300, 20], [300, 900], heads=8, kv_heads=1, tile_rows=ROWS, causal=True)
    assert work.tiles == ((1, 0), (0, 256), (0, 128), (0, 0))


@pytest.mark.parametrize(
    ("pages", "kv_heads", "each"),
    [
        ([32], 8, 12),  # 24 programs, one for each core
        ([256], 1, 12),
        ([256], 8, 88),
        ([256] * 16, 8, 128),  # 256 programs: 16 cores have eleven, the others ten
        ([1], 1, 4),
        ([0], 8, 4),
    ],
)
def test_decode_programs_are_as_long_as_the_cores_need(pages: list[int], kv_heads: int, each: int) -> None:
    assert pages_per_program(pages, kv_heads) == each


@given(st.lists(st.integers(1, 600), min_size=1, max_size=20), st.sampled_from([1, 2, 8]))
def test_no_fixed_length_of_programs_ends_much_earlier(pages: list[int], kv_heads: int) -> None:
    """Against every length, with the time until the last program ends on the first free core."""

    def end(each: int) -> float:
        free = [0.0] * CORES
        programs = [min(each, count - first) for count in pages for first in range(0, count, each)]
        for count in sorted(programs * kv_heads, reverse=True):
            heapq.heapreplace(free, free[0] + count + START_PAGES)
        parts = max(-(-count // each) for count in pages)
        return max(free) + -(-kv_heads * len(pages) // (2 * CORES)) * parts * MERGE_PAGES

    chosen = end(pages_per_program(pages, kv_heads))
    assert chosen <= 1.5 * min(end(each) for each in (4, 8, 16, 32, 64, 128, 256, 512))


def test_a_step_is_copied_once_for_all_layers() -> None:
    arguments = {"heads": 8, "kv_heads": 2, "tile_rows": ROWS, "causal": True, "device": torch.device("cpu")}
    first = on_device((0, 1, 3), (300, 9), **arguments)  # type: ignore[arg-type]
    assert on_device((0, 1, 3), (300, 9), **arguments) is first  # type: ignore[arg-type]
    assert on_device((0, 1, 3), (301, 9), **arguments).lengths.tolist() == [301, 9]  # type: ignore[arg-type]
