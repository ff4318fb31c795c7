"""Times a vendor's fused call for matmul and all-reduce against the best split of a layer's rows."""

from __future__ import annotations

import functools

from fastattention_vllm.parallel.calibrate import MANY_ROUNDS, SLOW, gains
from fastattention_vllm.parallel.choice import Choice, Trial
from fastattention_vllm.parallel.layer_timer import LayerTimer, OutOfTimeError, Work
from fastattention_vllm.parallel.plan import MIN_GAIN
from fastattention_vllm.parallel.tiled_linear import Linear


def contest(choice: Choice, timer: LayerTimer, name: str, layer: Linear) -> Choice:
    """Replace entries of ``choice`` by ``layer`` where it is clearly faster. All ranks must call this alike.

    Args:
        choice: the fastest splits so far. Its numbers of rows are tried, largest first, until the timer's budget ends.
        timer: a timer for the largest number of rows.
        name: the name of the fused call in the result.
        layer: maps input, weight and this rank's bias to the sum over the ranks.

    Raises:
        CollectiveError: a rank has ended, or has not answered in time.
    """
    trials = list(choice.trials)
    try:
        for at in reversed(range(len(trials))):
            trials[at] = _trial(trials[at], timer, name, layer)
    except OutOfTimeError:
        pass  # the rest stays as it was found
    return Choice(tuple(trials))


def _trial(trial: Trial, timer: LayerTimer, name: str, layer: Linear) -> Trial:
    """Its slow rounds must win, too, and against the plain layer by as much as a split must (see ``calibrate``)."""
    rows = trial.rows
    best = timer.cut(trial.collective, trial.blocks) if trial.collective else timer.plain(rows)
    whole = functools.partial(layer, timer.x[:rows], timer.weight, None)
    works: list[Work] = [timer.plain(rows), best, whole]
    plain, before, _ = timer.timed(works, MANY_ROUNDS)
    seconds = timer.timed(works, MANY_ROUNDS, SLOW)[2].effective_seconds
    if not gains(seconds, plain.seconds, trial.hideable_seconds):
        return trial
    if trial.collective and before.effective_seconds - seconds < MIN_GAIN * before.effective_seconds:
        return trial
    return Trial(rows, name, (rows,), seconds, plain.seconds, trial.hideable_seconds)
