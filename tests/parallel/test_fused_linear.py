"""A whole layer in one fused call, compared with the best split: chosen only if clearly faster, and used if chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from fastattention_vllm.parallel import fused_linear
from fastattention_vllm.parallel.calibrate import SLOW
from fastattention_vllm.parallel.choice import Choice, Trial
from fastattention_vllm.parallel.layer_timer import LayerTimer, OutOfTimeError, Timed

ROWS = 1024
HIDEABLE = 0.2
"""Seconds that could be hidden, out of one second of the plain layer."""


class Clock:
    """Replaces a LayerTimer: each timed work returns its own duration."""

    x, weight = torch.zeros(ROWS, 4), torch.zeros(8, 4)
    device = 1.0
    """Device time as a fraction of the total time, when everything is launched in advance."""

    def plain(self, rows: int) -> Callable[[], float]:
        return lambda: 1.0

    def cut(self, name: str, blocks: Sequence[int]) -> Callable[[], float]:
        assert name == "gloo"
        return lambda: 0.8

    def timed(self, works: Sequence[Callable[[], float]], rounds: int, rank: float = 0.5) -> list[Timed]:
        slower = 1.05 if rank == SLOW else 1.0
        return [Timed(slower * work() * self.device, slower * work()) for work in works]


def contest(before: Trial, seconds: float) -> Trial:
    """``seconds`` is the time of the fused call in a bad round."""

    def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        assert x.shape == (ROWS, 4)
        assert bias is None
        return seconds / 1.05

    (after,) = fused_linear.contest(Choice((before,)), cast(LayerTimer, Clock()), "one", layer).trials
    return after


PLAIN = Trial(ROWS, "", (ROWS,), 1.0, 1.0, HIDEABLE)
CUT = Trial(ROWS, "gloo", (512, 512), 0.8, 1.0, HIDEABLE)


@pytest.mark.parametrize(
    ("before", "seconds", "taken"),
    [
        (PLAIN, 0.91, True),
        (PLAIN, 0.93, False),  # hides less than two fifths of what can be hidden
        (PLAIN, 1.2, False),
        (CUT, 0.77, True),
        (CUT, 0.78, False),  # an already timed split is as good
        (CUT, 0.9, False),
    ],
)
def test_the_fused_call_is_chosen_where_it_is_clearly_faster(before: Trial, seconds: float, taken: bool) -> None:
    after = contest(before, seconds)
    if not taken:
        assert after == before
        return
    assert (after.collective, after.blocks) == ("one", (ROWS,))
    assert after.seconds == pytest.approx(seconds), "must be the time of a bad round"
    assert (after.plain_seconds, after.hideable_seconds) == (1.0, HIDEABLE)


def test_launch_time_in_python_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "device", 0.95)
    assert contest(CUT, 0.77).seconds == pytest.approx(0.77)
    assert contest(CUT, 0.78) == CUT


def test_when_the_time_is_over_the_other_trials_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest number of rows is tried first."""
    tried = []

    def trial(trial: Trial, *others: Any) -> Trial:
        tried.append(trial.rows)
        if len(tried) > 1:
            raise OutOfTimeError
        return replace(trial, collective="one")

    monkeypatch.setattr(fused_linear, "_trial", trial)
    before = [Trial(rows, "", (rows,), 1.0, 1.0, 0.5) for rows in (256, 512, 1024)]
    after = fused_linear.contest(Choice(tuple(before)), cast(LayerTimer, None), "one", torch.nn.functional.linear)
    assert tried == [1024, 512]
    assert after.trials == (*before[:2], replace(before[2], collective="one"))


def test_the_fused_call_is_used_between_numbers_of_rows_that_gained() -> None:
    one = Trial(ROWS, "one", (ROWS,), 0.7, 1.0, 0.5)
    cut = Trial(2 * ROWS, "gloo", (ROWS, ROWS), 0.7, 1.0, 0.5)
    choice = Choice((one, cut))
    assert choice.of(ROWS - 1) == ("", (ROWS - 1,))
    assert choice.of(1100) == ("one", (1100,))
    assert choice.of(2000) == ("gloo", (1024, 976))
    assert Choice((one,)).of(5000) == ("one", (5000,))
    assert Choice((one, Trial(2 * ROWS, "", (2 * ROWS,), 1.0, 1.0, 0.5))).of(1100) == ("", (1100,))
