"""The model of the two stages, compared with hand-computed results and with another algorithm."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.parallel.pipeline import Pipeline, Times
from tests.parallel.models import BLOCKS, PIPELINES, SLOWDOWNS, TIMES, affine


@given(TIMES, st.integers(1, 1 << 16), st.integers(0, 1 << 16))
def test_more_rows_never_take_less_time(times: Times, rows: int, more: int) -> None:
    assert times(rows) <= times(rows + more) * (1 + 1e-12)


@given(TIMES)
def test_times_are_interpolated_between_measured_points(times: Times) -> None:
    for rows, seconds in times.points:
        assert times(rows) == pytest.approx(seconds)
    for (rows0, seconds0), (rows1, seconds1) in itertools.pairwise(times.points):
        if (rows1 - rows0) % 2 == 0:
            assert times((rows0 + rows1) // 2) == pytest.approx((seconds0 + seconds1) / 2)


def test_times_are_extrapolated_beyond_the_measured_points() -> None:
    times = Times(((100, 1.0), (200, 1.5), (400, 3.5)))
    assert times(0) == 0
    assert times(1) == 1.0, "below the measured range the time is constant"
    assert times(600) == pytest.approx(5.5), "above the range the last rate continues"
    assert Times(((100, 2.0),))(300) == pytest.approx(6.0)
    line = affine(2.0, 0.5, granule=10)
    assert [line(rows) for rows in (1, 10, 50, 1 << 30)] == pytest.approx([7.0, 7.0, 27.0, 2 + 0.5 * (1 << 30)])


def test_decreasing_times_are_raised() -> None:
    assert Times.measured([(300, 2.0), (100, 1.0), (200, 3.0)]).points == ((100, 1.0), (200, 3.0), (300, 3.0))


NAN = float("nan")


@pytest.mark.parametrize(
    "points", [(), ((0, 1.0),), ((5, 1.0), (5, 2.0)), ((5, 2.0), (6, 1.0)), ((5, 0.0),), ((5, NAN),)]
)
def test_invalid_points_are_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match=r"must rise|at least one"):
        Times(points)


def test_slowdowns_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Pipeline(Times(((1, 1.0),)), Times(((1, 1.0),)), matmul_slowdown=0.9)


@given(PIPELINES, BLOCKS)
def test_without_slowdown_each_block_waits_for_its_matmul_and_for_the_link(
    pipeline: Pipeline, blocks: list[int]
) -> None:
    multiplied = reduced = 0.0
    for rows in blocks:
        multiplied += pipeline.matmul(rows)
        reduced = max(reduced, multiplied) + pipeline.all_reduce(rows)
    assert pipeline.seconds(blocks) == pytest.approx(reduced)


@given(TIMES, TIMES, SLOWDOWNS, SLOWDOWNS, BLOCKS)
def test_slow_lanes_take_longer_but_at_most_the_sum_of_their_times(
    matmul: Times, all_reduce: Times, slow_matmul: float, slow_all_reduce: float, blocks: list[int]
) -> None:
    seconds = Pipeline(matmul, all_reduce, slow_matmul, slow_all_reduce).seconds(blocks)
    first, last = matmul(blocks[0]), all_reduce(blocks[-1])
    # Without concurrent work, neither is slowed down.
    assert seconds >= Pipeline(matmul, all_reduce).seconds(blocks) * (1 - 1e-9)
    assert seconds >= first + last - 1e-9 * seconds
    matmuls, reduces = sum(map(matmul, blocks)), sum(map(all_reduce, blocks))
    assert seconds <= (slow_matmul * matmuls + slow_all_reduce * reduces) * (1 + 1e-9)


def test_slowdowns_count_only_while_both_lanes_work() -> None:
    """Blocks of 1 s each: 1 s alone, then both stages for 2 s at half speed, then 1 s alone."""
    one_second = Times(((10, 1.0), (20, 2.0)))
    assert Pipeline(one_second, one_second, 2.0, 2.0).seconds([10, 10]) == pytest.approx(1 + 2 + 1)
    # The all-reduce takes 1 s, in which a third of the matmul is done; the rest of the matmul runs alone.
    assert Pipeline(one_second, one_second, 3.0, 1.0).seconds([10, 10]) == pytest.approx(1 + 1 + 2 / 3 + 1)


@given(PIPELINES, st.integers(1, 5000))
def test_one_block_hides_nothing(pipeline: Pipeline, rows: int) -> None:
    assert pipeline.seconds([rows]) == pytest.approx(pipeline.matmul(rows) + pipeline.all_reduce(rows))


@given(PIPELINES, BLOCKS)
def test_nothing_saves_more_than_can_be_hidden(pipeline: Pipeline, blocks: list[int]) -> None:
    matmuls, reduces = sum(map(pipeline.matmul, blocks)), sum(map(pipeline.all_reduce, blocks))
    assert pipeline.seconds(blocks) >= max(matmuls, reduces) * (1 - 1e-9)
