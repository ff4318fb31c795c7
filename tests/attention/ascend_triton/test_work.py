"""The division of a step among programs: every query token once, every page once, and tiles in a good order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.attention.ascend_triton.masks import PAGE
from fastattention_vllm.attention.ascend_triton.specializations import DECODE_ROWS
from fastattention_vllm.attention.ascend_triton.work import MAX_DECODE_TOKENS, divide

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


def test_one_long_sequence_is_split_over_all_cores() -> None:
    (decoding,) = divide([1], [32768], heads=32, kv_heads=8, tile_rows=ROWS, causal=True).decodings
    assert decoding.splits * 8 >= 24
