"""Measured choices: the ranks agree on them, and they are stored. No test depends on how fast they are."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.parallel import calibrate, calibration_file, layer_timer
from fastattention_vllm.parallel.calibrate import MAX_SLOWDOWN, row_counts, slowdown
from fastattention_vllm.parallel.choice import Choice, Trial
from fastattention_vllm.parallel.collective import CollectiveError
from fastattention_vllm.parallel.layer_timer import Timed
from fastattention_vllm.parallel.pipeline import Pipeline
from fastattention_vllm.parallel.plan import GRANULE, cut, even, plan
from tests.other_user import as_another_user, needs_another_user
from tests.parallel import tasks
from tests.parallel.models import AFFINE, affine
from tests.parallel.ranks import Ranks


def test_ranks_that_differ_agree_on_one_choice(two_ranks: Ranks) -> None:
    """One rank is delayed in its matmuls, so the ranks measure different times."""
    first, second = two_ranks.run(tasks.measured, 48, 32, 200, 500)
    assert first == second
    assert isinstance(first, Choice)
    assert [trial.rows for trial in first.trials] == [256, 512]
    for trial in first.trials:
        assert trial.seconds <= trial.plain_seconds
        assert (trial.collective == "") == (len(trial.blocks) == 1)


@pytest.mark.parametrize(
    ("stage", "kept"), [("matmuls", []), ("sums", []), ("cuts of 512", [512]), ("cuts of 256", [256, 512])]
)
def test_if_one_rank_runs_out_of_time_all_keep_the_finished_trials(
    stage: str, kept: list[int], two_ranks: Ranks
) -> None:
    """No rank begins work in which it would wait for the other."""
    answers = two_ranks.run(tasks.measured_until, stage, [100, 500])
    for choice, said, sums_after in answers:
        assert choice == answers[0][0]
        assert [trial.rows for trial in choice.trials] == kept
        rest = f"steps of fewer than {kept[0]} tokens are not cut" if kept else "nothing is cut"
        assert said[-1] == f"{len(kept)} of 3 numbers of tokens were tried in 1000 s; {rest}"
        assert sums_after == 1, "only the sum that announces the end"
        assert choice.of(100) == ("", (100,))
    assert len(answers[0][0].trials) == len(kept)


def test_within_the_time_limit_everything_is_tried(two_ranks: Ranks) -> None:
    for choice, said, _ in two_ranks.run(tasks.measured_until, "never", [100, 500]):
        assert [trial.rows for trial in choice.trials] == [128, 256, 512]
        assert said == [
            "matmuls of up to 512 tokens are timed",
            "sums by gloo are timed",
            *(f"cuts of {rows} tokens are timed" for rows in (512, 256, 128)),
        ]


class Never:
    def query(self) -> bool:
        return False


def test_a_gpu_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    by_default = layer_timer.STUCK
    monkeypatch.setattr(layer_timer, "STUCK", 0.05)
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="tiling_all_reduce"):
        layer_timer.wait_for(Never())
    assert time.monotonic() - began < by_default


class Slowly:
    """Replaces a LayerTimer. Simulates a GPU on which 4096 rows take a millisecond to multiply and one to sum.

    Each block costs a fixed time to launch, and concurrent work does not slow down.
    """

    def __init__(self, enqueue_seconds: float) -> None:
        self._enqueue_seconds = enqueue_seconds
        self._lanes = Pipeline(MILLISECOND, MILLISECOND)

    def plain(self, rows: int) -> tuple[int, ...]:
        return (rows,)

    def cut(self, name: str, blocks: tuple[int, ...]) -> tuple[int, ...]:
        return blocks

    def timed(self, works: list[tuple[int, ...]], rounds: int = 0, rank: float = 0.5) -> list[Timed]:
        return [Timed(self._lanes.seconds(blocks), self._enqueue_seconds * len(blocks)) for blocks in works]

    def seconds(self, works: list[tuple[int, ...]], rounds: int = 0, rank: float = 0.5) -> list[float]:
        return [one.seconds for one in self.timed(works)]


MILLISECOND = affine(0, 1e-3 / 4096)


@pytest.mark.parametrize(
    ("enqueue_seconds", "least", "most"),
    [(0.0, 8, 16), (0.25e-3, 2, 5), (1e-3, 1, 1)],
    ids=["at once", "a few are as fast as their orders", "slower than plain"],
)
def test_a_split_takes_at_least_its_launch_time(enqueue_seconds: float, least: int, most: int) -> None:
    timer: Any = Slowly(enqueue_seconds)
    found = calibrate._trial(timer, 4096, MILLISECOND, {"nccl": MILLISECOND})
    assert least <= len(found.blocks) <= most
    assert found.seconds >= enqueue_seconds * len(found.blocks)
    assert found.plain_seconds == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("seconds", "plain", "hideable", "clear"),
    [
        (2.02, 2.48, 1.18, True),  # 39 % hidden, 1.23x
        (3.43, 3.80, 1.49, False),  # 25 % hidden, 9.7 % saved
        (0.96, 1.0, 0.09, True),  # 44 % hidden
        (0.98, 1.0, 0.02, False),  # all hidden, but less than 3 % saved
        (1.2, 1.0, 0.5, False),
    ],
)
def test_a_split_must_clearly_gain(seconds: float, plain: float, hideable: float, clear: bool) -> None:
    assert calibrate.gains(seconds, plain, hideable) == clear


@given(st.integers(1, 100_000))
def test_rows_are_doubled_until_the_longest_step_is_covered(most: int) -> None:
    numbers = row_counts(most)
    assert numbers == [GRANULE << i for i in range(len(numbers))]
    assert numbers[-1] >= most
    assert len(numbers) == 1 or numbers[-2] < most


@given(AFFINE, st.floats(1, MAX_SLOWDOWN), st.integers(2, 6))
def test_a_slowdown_is_recovered_from_the_time_of_a_split(pipeline: Pipeline, slow: float, count: int) -> None:
    """The slowdown is recovered from the time of a split: exactly, or as one that gives the same time."""
    blocks = even(4096, count)
    slowed = Pipeline(pipeline.matmul, pipeline.all_reduce, slow, slow)
    part = slowed.seconds(blocks) / pipeline.seconds((4096,))
    found = slowdown(pipeline.matmul, pipeline.all_reduce, blocks, part)
    again = Pipeline(pipeline.matmul, pipeline.all_reduce, found, found)
    assert again.seconds(blocks) == pytest.approx(slowed.seconds(blocks), rel=1e-6)


@given(AFFINE)
def test_a_split_that_lost_its_trial_is_not_planned(pipeline: Pipeline) -> None:
    """This holds however fast the two stages are alone."""
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
def test_any_number_of_rows_is_split_without_losing_a_row(choice: Choice, rows: int) -> None:
    name, blocks = choice.of(rows)
    assert sum(blocks) == rows
    assert all(blocks)
    assert all(block % GRANULE == 0 for block in blocks[:-1])
    assert name in ("", "nccl")
    if len(blocks) > 1:
        below = [one for one in choice.trials if one.rows <= rows]
        above = [one for one in choice.trials if one.rows >= rows]
        assert below
        assert all(len(one.blocks) > 1 for one in (below[-1:] + above[:1])), "both neighbours must have gained"
        assert name == "nccl"


@given(choices())
def test_timed_numbers_of_rows_use_their_trial(choice: Choice) -> None:
    for one in choice.trials:
        assert choice.of(one.rows) == (one.collective, one.blocks)


def test_between_two_trials_the_nearer_one_is_used() -> None:
    choice = Choice((trial(1024, (512, 512)), trial(2048, (512, 1536)), trial(4096, (4096,))))
    assert choice.of(1023) == ("", (1023,)), "fewer rows than were tried"
    assert choice.of(1408) == ("nccl", (768, 640))
    assert choice.of(1792) == ("nccl", (512, 1280))
    assert choice.of(2049) == ("", (2049,)), "the trial above did not gain"
    assert choice.of(9000) == ("", (9000,))


def test_a_trial_whose_blocks_do_not_add_up_is_refused() -> None:
    with pytest.raises(ValueError, match="do not add up to 1024"):
        trial(1024, (512, 256))


@given(choices(), choices())
def test_written_choices_can_be_read(tmp_path_factory: pytest.TempPathFactory, one: Choice, other: Choice) -> None:
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


GOOD: dict[str, object] = {
    "rows": 4096,
    "collective": "nccl",
    "blocks": [2048, 2048],
    "seconds": 1.0,
    "plain_seconds": 2.0,
    "hideable_seconds": 1.0,
}


def entry(**changes: object) -> str:
    return json.dumps({"a": {"trials": [GOOD | changes]}})


def test_a_good_entry_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tiling.json"
    path.write_text(entry())
    read = calibration_file.read(path, "a")
    assert read is not None
    assert read.of(4096) == ("nccl", (2048, 2048))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        "[" * 100_000,
        '{"a": 1}',
        '{"a": {"trials": [{"rows": 1}]}}',
        '{"a": {"trials": []}}',
        '{"a": {"trials": [1]}}',
        entry(rows=math.inf, blocks=[1]),
        entry(rows=0, blocks=[]),
        entry(rows=4096.0),
        entry(blocks=[2048, math.inf]),
        entry(blocks=[4097, -1]),
        entry(blocks=[2048]),
        entry(blocks="11"),
        entry(collective=""),
        entry(seconds=0),
        entry(plain_seconds=math.nan),
        entry(hideable_seconds=0),
        entry(hideable_seconds="1"),
        json.dumps({"a": {"trials": [GOOD, GOOD]}}),
    ],
)
def test_an_invalid_file_is_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tiling.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"tiling\.json holds no valid measurements"):
        calibration_file.read(path, "a")
    calibration_file.write(path, "a", Choice((trial(256, (256,)),)))
    assert calibration_file.read(path, "a") is not None


def test_what_is_no_file_is_neither_waited_for_nor_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users may share the folder (VLLM_CACHE_ROOT)."""
    path = tmp_path / "tiling.json"
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"tiling\.json cannot be read \(it is not a regular file\)"):
        calibration_file.read(path, "a")
    calibration_file.write(path, "a", one := Choice((trial(256, (256,)),)))
    assert calibration_file.read(path, "a") == one
    monkeypatch.setattr(calibration_file, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match=r"tiling\.json cannot be read \(it has \d+ bytes\)"):
        calibration_file.read(path, "a")


@needs_another_user
def test_other_users_of_the_folder_can_neither_redirect_nor_hold_up_what_is_written() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o1777)
        path, mine = folder / "tiling.json", folder / "mine"
        mine.write_text("of this user")

        def act() -> None:
            os.mkfifo(path)
            (folder / f"tiling.json.{os.getppid()}").symlink_to(mine)

        as_another_user(act)
        with pytest.raises(ValueError, match="not a regular file"):
            calibration_file.read(path, "a")
        calibration_file.write(path, "a", one := Choice((trial(256, (256,)),)))
        assert calibration_file.read(path, "a") == one
        assert mine.read_text() == "of this user"


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiling.json").write_bytes(b"\xff\xfe")
    for path in (tmp_path, tmp_path / "tiling.json"):
        with pytest.raises(ValueError, match="cannot be read"):
            calibration_file.read(path, "a")
