"""Measured pipelines: that the ranks agree on them, that they outlive the process; never how fast they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.parallel import calibration_file
from fastattention_vllm.parallel.calibrate import MOST_SLOWDOWN, row_counts, slowdown
from fastattention_vllm.parallel.pipeline import Pipeline
from fastattention_vllm.parallel.plan import GRANULE, even, plan
from tests.parallel import tasks
from tests.parallel.models import AFFINE, SLOWED_PIPELINES
from tests.parallel.ranks import Ranks


def test_ranks_that_differ_agree_on_one_pipeline(two_ranks: Ranks) -> None:
    """One of them is kept back in its matmuls, so what they measure is not the same."""
    first, second = two_ranks.run(tasks.measured, 48, 32, 500)
    assert first == second
    assert isinstance(first, Pipeline)
    for times in (first.matmul, first.all_reduce):
        assert [rows for rows, _ in times.points] == [128, 256, 512]
    slept = first.matmul(512)
    assert slept >= tasks.KEPT_BACK / 2, "the mean of both ranks"


@given(st.integers(1, 100_000))
def test_rows_are_doubled_until_the_longest_step_is_covered(most: int) -> None:
    numbers = row_counts(most)
    assert numbers == [GRANULE << i for i in range(len(numbers))]
    assert numbers[-1] >= most
    assert len(numbers) == 1 or numbers[-2] < most


@given(AFFINE, st.floats(1, MOST_SLOWDOWN), st.integers(2, 6))
def test_a_slowdown_is_found_again(pipeline: Pipeline, slow: float, count: int) -> None:
    """By the time that a cut takes with it; exactly this slowdown, or one that makes no difference to the time."""
    blocks = even(4096, count)
    slowed = Pipeline(pipeline.matmul, pipeline.all_reduce, slow, slow)
    part = slowed.seconds(blocks) / pipeline.seconds((4096,))
    found = slowdown(pipeline.matmul, pipeline.all_reduce, blocks, part)
    again = Pipeline(pipeline.matmul, pipeline.all_reduce, found, found)
    assert again.seconds(blocks) == pytest.approx(slowed.seconds(blocks), rel=1e-6)


@given(AFFINE)
def test_a_cut_that_was_tried_and_lost_is_not_planned(pipeline: Pipeline) -> None:
    """However fast the two lanes are alone."""
    blocks = plan(8192, pipeline).blocks
    slow = slowdown(pipeline.matmul, pipeline.all_reduce, blocks, 1.0)
    after = plan(8192, Pipeline(pipeline.matmul, pipeline.all_reduce, slow, slow))
    assert len(blocks) == 1 or after.blocks != blocks


@given(SLOWED_PIPELINES, SLOWED_PIPELINES)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, one: Pipeline, other: Pipeline) -> None:
    path = tmp_path_factory.mktemp("cache") / "new" / "tiling.json"
    assert calibration_file.read(path, "a") is None
    calibration_file.write(path, "a", one)
    calibration_file.write(path, "b", other)
    assert calibration_file.read(path, "a") == one
    assert calibration_file.read(path, "b") == other
    assert calibration_file.read(path, "c") is None
    calibration_file.write(path, "a", other)
    assert calibration_file.read(path, "a") == other
    assert [entry.name for entry in path.parent.iterdir()] == ["tiling.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '{"a": {"matmul": {"points": [[1, -1]]}}}'])
def test_a_file_that_is_not_ours_is_measured_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tiling.json"
    path.write_text(text)
    assert calibration_file.read(path, "a") is None
