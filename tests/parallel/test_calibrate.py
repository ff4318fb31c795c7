"""Measured choices: that the ranks agree on them, that they outlive the process; never how fast they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.parallel import calibration_file
from fastattention_vllm.parallel.calibrate import MOST_SLOWDOWN, row_counts, slowdown
from fastattention_vllm.parallel.choice import Choice, Trial
from fastattention_vllm.parallel.pipeline import Pipeline
from fastattention_vllm.parallel.plan import GRANULE, cut, even, plan
from tests.parallel import tasks
from tests.parallel.models import AFFINE
from tests.parallel.ranks import Ranks


def test_ranks_that_differ_agree_on_one_choice(two_ranks: Ranks) -> None:
    """One of them is kept back in its matmuls, so what they measure is not the same."""
    first, second = two_ranks.run(tasks.measured, 48, 32, 200, 500)
    assert first == second
    assert isinstance(first, Choice)
    assert [trial.rows for trial in first.trials] == [256, 512]
    for trial in first.trials:
        assert trial.seconds <= trial.plain_seconds
        assert (trial.collective == "") == (len(trial.blocks) == 1)


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


def trial(rows: int, blocks: tuple[int, ...], seconds: float = 0.9) -> Trial:
    return Trial(rows, "nccl" if len(blocks) > 1 else "", blocks, seconds, 1.0, 0.5)


@st.composite
def choices(draw: st.DrawFn) -> Choice:
    trials = []
    for rows in sorted(draw(st.lists(st.sampled_from([GRANULE << i for i in range(9)]), min_size=1, unique=True))):
        weights = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
        trials.append(trial(rows, cut(rows, weights, GRANULE), draw(st.floats(1e-6, 1))))
    return Choice(tuple(trials))


@given(choices(), st.integers(0, 50_000))
def test_any_number_of_rows_is_cut_without_a_row_lost(choice: Choice, rows: int) -> None:
    name, blocks = choice.of(rows)
    assert sum(blocks) == rows
    assert all(blocks)
    assert all(block % GRANULE == 0 for block in blocks[:-1])
    assert name in ("", "nccl")
    if len(blocks) > 1:
        below = [one for one in choice.trials if one.rows <= rows]
        above = [one for one in choice.trials if one.rows >= rows]
        assert below
        assert all(len(one.blocks) > 1 for one in (below[-1:] + above[:1])), "both neighbours gained"
        assert name == "nccl"


@given(choices())
def test_what_was_timed_is_what_is_done(choice: Choice) -> None:
    for one in choice.trials:
        assert choice.of(one.rows) == (one.collective, one.blocks)


def test_between_two_the_nearer_one_is_followed() -> None:
    choice = Choice((trial(1024, (512, 512)), trial(2048, (512, 1536)), trial(4096, (4096,))))
    assert choice.of(1023) == ("", (1023,)), "fewer than were tried"
    assert choice.of(1408) == ("nccl", (768, 640))
    assert choice.of(1792) == ("nccl", (512, 1280))
    assert choice.of(2049) == ("", (2049,)), "what does not gain above"
    assert choice.of(9000) == ("", (9000,))


def test_blocks_that_are_not_the_rows_are_no_trial() -> None:
    with pytest.raises(ValueError, match="are not 1024"):
        trial(1024, (512, 256))


@given(choices(), choices())
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, one: Choice, other: Choice) -> None:
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


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '{"a": {"trials": [{"rows": 1}]}}'])
def test_a_file_that_is_not_ours_is_measured_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tiling.json"
    path.write_text(text)
    assert calibration_file.read(path, "a") is None
