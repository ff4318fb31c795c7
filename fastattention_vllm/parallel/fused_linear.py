"""A layer whose matmul and all-reduce a vendor's library does in one call, timed beside the best cut of its rows."""

from __future__ import annotations

import functools

from fastattention_vllm.parallel.calibrate import MANY_ROUNDS, MIN_HIDDEN, SLOW
from fastattention_vllm.parallel.choice import Choice, Trial
from fastattention_vllm.parallel.layer_timer import LayerTimer, OutOfTimeError, Work
from fastattention_vllm.parallel.plan import MIN_GAIN
from fastattention_vllm.parallel.tiled_linear import Linear


def contest(choice: Choice, timer: LayerTimer, name: str, layer: Linear) -> Choice:
    """``choice`` with ``layer`` in the place of what it is clearly faster than; all ranks call this alike.

    Args:
        choice: what was found fastest without it; its rows are tried, most first, until the timer's budget is over.
        timer: for as many rows as the last of them.
        name: by which the answer tells it.
        layer: input, weight and this rank's bias to the sum over the ranks.

    Raises:
        CollectiveError: a rank is gone, or has not answered in time.
    """
    trials = list(choice.trials)
    try:
        for at in reversed(range(len(trials))):
            trials[at] = _trial(trials[at], timer, name, layer)
    except OutOfTimeError:
        pass  # the rest stays as it was found
    return Choice(tuple(trials))


def _trial(trial: Trial, timer: LayerTimer, name: str, layer: Linear) -> Trial:
    """It must win even when it is slow, against the plain layer by as much as a cut must (see ``calibrate``)."""
    rows = trial.rows
    best = timer.cut(trial.collective, trial.blocks) if trial.collective else timer.plain(rows)
    whole = functools.partial(layer, timer.x[:rows], timer.weight, None)
    works: list[Work] = [timer.plain(rows), best, whole]
    plain, before, _ = timer.timed(works, MANY_ROUNDS)
    seconds = timer.timed(works, MANY_ROUNDS, SLOW)[2].effective_seconds
    if plain.seconds - seconds < max(MIN_GAIN * plain.seconds, MIN_HIDDEN * trial.hideable_seconds):
        return trial
    if trial.collective and before.effective_seconds - seconds < MIN_GAIN * before.effective_seconds:
        return trial
    return Trial(rows, name, (rows,), seconds, plain.seconds, trial.hideable_seconds)
