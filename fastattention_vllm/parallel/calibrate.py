"""Finds the fastest way to split a layer's rows on these ranks, by timing some proposals of a model.

The model (plan.py) knows the times of matmul and all-reduce alone. It learns how much they slow each other down from
its first proposals. A split is used only if it was faster than the plain layer when it was timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from fastattention_vllm.parallel.choice import Choice, Trial
from fastattention_vllm.parallel.collective import Collective
from fastattention_vllm.parallel.layer_timer import LayerTimer, OutOfTimeError
from fastattention_vllm.parallel.pipeline import Pipeline, Times
from fastattention_vllm.parallel.plan import GRANULE, MIN_GAIN, even, plan
from fastattention_vllm.parallel.tiled_linear import Linear

BUDGET = 30.0
"""Seconds for a layer. On two H200 layers of an 8B model take 2 to 10 s up to 32K tokens, of a 70B model 3 to 14."""
MAX_SLOWDOWN = 8.0
COUNTS = (2, 4, 8)
"""Numbers of equal blocks that are always tried, whatever the model predicts."""
MIN_BLOCK = 256
"""Rows of those."""
FEW_ROUNDS, MANY_ROUNDS = 3, 11
MAX_FINALISTS = 4
MIN_HIDDEN = 0.4
"""The fraction of the hideable time that a split must hide. A split that hides less gains little, and is the first to
lose under worse conditions. ``SURE_GAIN`` is enough instead."""
SURE_GAIN = 0.1
"""The fraction of the plain layer's time. Where matmul and sum take about as long, a split can hide a third and still
be 1.2x as fast: of four H100 with NVLink, 8B down_proj at 32768 tokens."""
SLOW = 0.8
"""The quantile of the rounds that counts as the time of a split. For the plain layer, the median counts."""

Candidate = tuple[str, tuple[int, ...]]


def measure(
    collectives: Mapping[str, Collective],
    plain: Linear,
    weight: torch.Tensor,
    min_rows: int,
    max_rows: int,
    budget: float = BUDGET,
    say: Callable[[str], object] = lambda line: None,
) -> Choice:
    """Try splits of layers of ``weight`` ([outputs, inputs]) for ``min_rows`` to ``max_rows`` rows.

    Every rank of the group calls this with a weight of the same shape and gets the same result, because the ranks' mean
    times decide. It takes some hundred times as long as the slowest layer. The largest numbers of rows are tried first.
    When the time is over, the results so far are kept, and smaller numbers of rows are not split.

    Args:
        collectives: the candidates, by name. The first one also carries messages between the ranks.
        plain: the layer without blocks, summed over the ranks.
        budget: seconds after which no rank begins another measurement.
        say: called with a line of text about each finished step.

    Raises:
        CollectiveError: a rank is gone, or has not answered in time.
    """
    numbers = row_counts(max_rows)
    tried = [rows for rows in numbers if rows >= min_rows] or numbers[-1:]
    bench = LayerTimer(collectives, plain, weight, numbers[-1], budget)
    trials: list[Trial] = []
    try:
        seconds = bench.seconds([bench.matmul(rows) for rows in numbers])
        matmul = Times.measured(list(zip(numbers, seconds, strict=True)))
        say(f"matmuls of up to {numbers[-1]} tokens are timed")
        sums = {}
        for name in collectives:
            seconds = bench.seconds([bench.all_reduce(name, rows) for rows in numbers])
            sums[name] = Times.measured(list(zip(numbers, seconds, strict=True)))
            say(f"sums by {name} are timed")
        for rows in reversed(tried):
            trials.insert(0, _trial(bench, rows, matmul, sums))
            say(f"cuts of {rows} tokens are timed")
    except OutOfTimeError:
        rest = f"steps of fewer than {trials[0].rows} tokens are not cut" if trials else "nothing is cut"
        say(f"{len(trials)} of {len(tried)} numbers of tokens were tried in {budget:.0f} s; {rest}")
    return Choice(tuple(trials))


def row_counts(maximum: int) -> list[int]:
    """The granule and its doubles, up to the first that has ``maximum`` rows or more."""
    numbers = [GRANULE]
    while numbers[-1] < maximum:
        numbers.append(2 * numbers[-1])
    return numbers


def slowdown(matmul: Times, all_reduce: Times, blocks: Sequence[int], part: float) -> float:
    """How much both stages slow each other down when they overlap, from 1 to ``MAX_SLOWDOWN``.

    Args:
        blocks: rows per block of a split that was tried.
        part: its time, relative to the same rows in one block. Both are compared with the model's predictions, so that
            effects that the model ignores for both (cold caches) cancel out.
    """
    low, high = 1.0, MAX_SLOWDOWN
    whole = matmul(sum(blocks)) + all_reduce(sum(blocks))
    for _ in range(30):
        middle = (low + high) / 2
        if Pipeline(matmul, all_reduce, middle, middle).seconds(blocks) > part * whole:
            high = middle
        else:
            low = middle
    return low


def _trial(timer: LayerTimer, rows: int, matmul: Times, sums: Mapping[str, Times]) -> Trial:
    """Time the candidates in heats.

    All candidates run a few rounds. These improve the model. The best candidates and the improved model's proposals run
    more rounds. Finally the winner runs against the plain layer, and even its slow rounds must be faster. If Python
    takes longer to launch a split than a GPU to compute it, the launch time counts.
    """
    alone = {name: Pipeline(matmul, times) for name, times in sums.items()}
    counts = [count for count in COUNTS if rows >= count * MIN_BLOCK]
    first = _distinct(
        [(name, plan(rows, pipeline).blocks) for name, pipeline in alone.items()]
        + [(name, even(rows, count)) for name in sums for count in counts]
    )
    hideable = min(matmul(rows), next(iter(sums.values()))(rows))
    if not first:
        plain = timer.seconds([timer.plain(rows)])[0]
        return Trial(rows, "", (rows,), plain, plain, hideable)
    heat = timer.timed([timer.cut(*one) for one in first], FEW_ROUNDS)
    timed = sorted((one.effective_seconds, one.seconds, candidate) for one, candidate in zip(heat, first, strict=True))
    best = [one for _, _, one in timed[:MAX_FINALISTS]]
    learned = []
    for name in sums:
        seconds, blocks = next(((seconds, one[1]) for _, seconds, one in timed if one[0] == name), (0.0, ()))
        if blocks:
            slow = slowdown(matmul, sums[name], blocks, seconds / (matmul(rows) + sums[name](rows)))
            learned.append((name, plan(rows, Pipeline(matmul, sums[name], slow, slow)).blocks))
    final = _distinct([*best, *learned])
    heat = timer.timed([timer.cut(*one) for one in final])
    _, (name, blocks) = min(zip([one.effective_seconds for one in heat], final, strict=True))
    works = [timer.plain(rows), timer.cut(name, blocks)]
    plain_seconds, _ = timer.seconds(works, MANY_ROUNDS)
    seconds = timer.timed(works, MANY_ROUNDS, SLOW)[1].effective_seconds
    if not gains(seconds, plain_seconds, hideable):
        return Trial(rows, "", (rows,), plain_seconds, plain_seconds, hideable)
    return Trial(rows, name, blocks, seconds, plain_seconds, hideable)


def gains(seconds: float, plain_seconds: float, hideable: float) -> bool:
    """Whether a split is clearly faster than the plain layer. ``hideable``: seconds of its shorter stage."""
    saved = plain_seconds - seconds
    enough = saved >= MIN_HIDDEN * hideable or saved >= SURE_GAIN * plain_seconds
    return enough and saved >= MIN_GAIN * plain_seconds


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates in order, each with several blocks."""
    return [one for one in dict.fromkeys(candidates) if len(one[1]) > 1]
