"""Plans compared with every other way to split the rows, and with the rules of planning."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.parallel.pipeline import Pipeline, Times
from fastattention_vllm.parallel.plan import COUNTS, GRANULE, MIN_GAIN, Plan, cut, even, plan
from tests.parallel.models import AFFINE, MEASURED, PIPELINES, SLOWED_PIPELINES, affine

ROWS = st.integers(1, 40_000)
GRANULES = st.sampled_from([1, 64, 128])


def check(blocks: tuple[int, ...], rows: int, granule: int) -> None:
    """Every row is covered once and in order: each block begins where the previous one ends."""
    assert sum(blocks) == rows
    assert all(block > 0 for block in blocks)
    assert all(block % granule == 0 for block in blocks[:-1])


def every_cut(rows: int, granule: int) -> Iterator[tuple[int, ...]]:
    """Every set of block boundaries at multiples of ``granule``."""
    inner = range(granule, rows, granule)
    for count in range(len(inner) + 1):
        for boundaries in itertools.combinations(inner, count):
            edges = (0, *boundaries, rows)
            yield tuple(end - begin for begin, end in itertools.pairwise(edges))


@given(ROWS, SLOWED_PIPELINES, GRANULES)
def test_every_row_is_in_one_block_and_no_plan_is_slower_than_one_block(
    rows: int, pipeline: Pipeline, granule: int
) -> None:
    chosen = plan(rows, pipeline, granule)
    check(chosen.blocks, rows, granule)
    assert chosen.seconds == pipeline.seconds(chosen.blocks)
    assert chosen.one_block_seconds == pipeline.seconds((rows,))
    assert chosen.hideable_seconds == min(pipeline.matmul(rows), pipeline.all_reduce(rows))
    if len(chosen.blocks) > 1:
        assert chosen.seconds <= (1 - MIN_GAIN) * chosen.one_block_seconds
        assert len(chosen.blocks) <= max(COUNTS)
    else:
        assert chosen.seconds == chosen.one_block_seconds
        assert chosen.hidden == 0


def test_no_rows_give_no_blocks() -> None:
    assert plan(0, V100_PCIE) == Plan((), 0.0, 0.0, 0.0)
    assert plan(0, V100_PCIE).hidden == 0
    assert even(0, 4) == ()


@given(ROWS, SLOWED_PIPELINES, GRANULES)
def test_the_same_numbers_give_the_same_plan(rows: int, pipeline: Pipeline, granule: int) -> None:
    """Ranks plan in separate processes, so equal numbers in different objects must give the same plan."""
    copy = Pipeline(
        Times(tuple(pipeline.matmul.points)),
        Times(tuple(pipeline.all_reduce.points)),
        pipeline.matmul_slowdown,
        pipeline.all_reduce_slowdown,
    )
    first = plan(rows, pipeline, granule)
    plan.cache_clear()
    assert plan(rows, copy, granule) == first


@settings(max_examples=150)
@given(st.integers(1, 10), st.integers(0, 63), st.one_of(AFFINE, MEASURED))
def test_plans_are_within_five_percent_of_the_best_of_all_cuts(granules: int, missing: int, pipeline: Pipeline) -> None:
    """Three of these percent are the minimum gain of several blocks. The last granule is planned as a full one."""
    best = min(map(pipeline.seconds, every_cut(64 * granules, 64)))
    assert plan(64 * granules, pipeline, 64).seconds <= 1.05 * best
    assert plan(64 * granules - missing, pipeline, 64).seconds <= 1.05 * best


@given(st.integers(4, 300), AFFINE)
def test_blocks_are_in_johnsons_order(granules: int, pipeline: Pipeline) -> None:
    """First blocks with a longer sum than matmul, in increasing order; then the others, in decreasing order."""
    blocks = plan(granules * GRANULE, pipeline).blocks
    rising = list(itertools.takewhile(pipeline.link_bound, blocks))
    falling = list(blocks[len(rising) :])
    assert not any(map(pipeline.link_bound, falling))
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)


# Computed for inputs of 4096 per rank, 8192 outputs, fp16, 2 ranks. A V100's matmul runs at 100 TFLOPS; an all-reduce
# sends each row's 16 KiB at 10 GB/s of PCIe or 125 GB/s of NVLink.
V100_PCIE = Pipeline(affine(2e-5, 0.67e-6, GRANULE), affine(5e-5, 1.64e-6, GRANULE))
V100_NVLINK = Pipeline(affine(2e-5, 0.67e-6, GRANULE), affine(3e-5, 0.13e-6, GRANULE))


def test_a_slow_link_gets_a_small_first_block_and_hides_most_of_the_matmul() -> None:
    chosen = plan(8192, V100_PCIE)
    assert chosen.blocks[0] < 8192 / len(chosen.blocks)
    assert chosen.blocks[0] <= chosen.blocks[1] <= chosen.blocks[2]
    assert chosen.hidden > 0.92


def test_a_fast_link_gets_a_small_last_block_and_hides_most_of_the_all_reduce() -> None:
    chosen = plan(8192, V100_NVLINK)
    assert chosen.blocks[-1] < 8192 / len(chosen.blocks)
    assert chosen.blocks[0] >= chosen.blocks[-2] >= chosen.blocks[-1]
    assert chosen.hidden > 0.88


def test_short_steps_stay_whole() -> None:
    slow_start = Pipeline(affine(1e-3, 1e-8, GRANULE), affine(1e-3, 1e-8, GRANULE))
    for rows in (1, 127, 128, 129, 256, 2048):
        assert plan(rows, slow_start).blocks == (rows,)
    assert len(plan(1 << 20, slow_start).blocks) > 1


def test_steps_stay_whole_if_concurrent_stages_gain_nothing() -> None:
    """If both run at half speed when concurrent, overlapping gains nothing."""
    halved = Pipeline(V100_PCIE.matmul, V100_PCIE.all_reduce, 2.0, 2.0)
    assert plan(8192, halved).blocks == (8192,)
    assert len(plan(8192, V100_PCIE).blocks) > 1


def test_slowdowns_may_reverse_the_order_of_blocks() -> None:
    """Here the all-reduce slows down and the matmul does not.

    Johnson's rule would order the two blocks the other way.
    """
    times = Times(((64, 8.6e-5), (128, 14.2e-5)))
    pipeline = Pipeline(times, times, 1.0, 1.5)
    assert plan(192, pipeline, 64).blocks == min(every_cut(192, 64), key=pipeline.seconds) == (64, 128)
    assert not pipeline.link_bound(64)
    assert pipeline.seconds((128, 64)) > pipeline.seconds((192,))


@given(ROWS, AFFINE)
def test_a_plan_does_not_depend_on_the_unit_of_time(rows: int, pipeline: Pipeline) -> None:
    def scaled(times: Times) -> Times:
        return Times(tuple((count, 4 * seconds) for count, seconds in times.points))

    slower = plan(rows, Pipeline(scaled(pipeline.matmul), scaled(pipeline.all_reduce)))
    assert slower.blocks == plan(rows, pipeline).blocks


@given(ROWS, AFFINE, st.sampled_from([1.25, 2.0, 10.0]))
def test_a_faster_link_is_never_planned_slower(rows: int, pipeline: Pipeline, faster: float) -> None:
    points = tuple((count, seconds / faster) for count, seconds in pipeline.all_reduce.points)
    quick = plan(rows, Pipeline(pipeline.matmul, Times(points)))
    # A plan may miss the best one by its minimum gain.
    assert quick.seconds * (1 - MIN_GAIN) <= plan(rows, pipeline).seconds


@given(st.integers(0, 40_000), st.integers(1, 20), GRANULES)
def test_even_blocks_differ_by_one_granule(rows: int, count: int, granule: int) -> None:
    blocks = even(rows, count, granule)
    check(blocks, rows, granule)
    granules = -(-rows // granule)
    assert len(blocks) == min(count, granules)
    sizes = [-(-block // granule) for block in blocks]
    assert not sizes or max(sizes) - min(sizes) <= 1


@given(ROWS, st.lists(st.integers(1, 1000), min_size=1, max_size=12), GRANULES)
def test_splits_follow_their_weights_to_the_granule(rows: int, weights: list[int], granule: int) -> None:
    blocks = cut(rows, weights, granule)
    check(blocks, rows, granule)
    granules = -(-rows // granule)
    boundaries = {Fraction(granules * part, sum(weights)) for part in itertools.accumulate(weights)}
    for end in itertools.accumulate(blocks[:-1]):
        assert min(abs(end // granule - boundary) for boundary in boundaries) <= Fraction(1, 2)


@given(st.integers(0, 3000), PIPELINES)
def test_planning_for_every_length_of_a_batch_covers_it(rows: int, pipeline: Pipeline) -> None:
    """Lengths arrive as in a server: one after the other, cached or not."""
    for length in (rows, rows + 1, rows):
        assert sum(plan(length, pipeline).blocks) == length
