"""Which cut of a layer's rows is fastest on these ranks: a few that the model proposes are timed.

The model (plan.py) knows how long matmul and all-reduce take alone. What they take from each other is learned from its
own first proposals. Only what was faster than the plain layer when it was timed is ever used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from fastattention_vllm.parallel.choice import Choice, Trial
from fastattention_vllm.parallel.collective import Collective
from fastattention_vllm.parallel.layer_timer import LayerTimer
from fastattention_vllm.parallel.pipeline import Pipeline, Times
from fastattention_vllm.parallel.plan import GRANULE, LEAST_GAIN, even, plan
from fastattention_vllm.parallel.tiled_linear import Linear

MOST_SLOWDOWN = 8.0

Candidate = tuple[str, tuple[int, ...]]


def measure(
    collectives: Mapping[str, Collective], plain: Linear, weight: torch.Tensor, least_rows: int, most_rows: int
) -> Choice:
    """Try cuts of layers of ``weight`` ([outputs, inputs]) for ``least_rows`` to ``most_rows`` rows.

    Every rank of the group calls this with a weight of the same shape and gets the same answer: the ranks' mean times
    decide. Takes some hundred times as long as the longest layer.

    Args:
        collectives: those to choose from, by name. The first carries what the ranks tell each other.
        plain: what the layer does without a cut, summed over the ranks.

    Raises:
        CollectiveError: a rank is gone, or has not answered in time.
    """
    numbers = row_counts(most_rows)
    tried = [rows for rows in numbers if rows >= least_rows] or numbers[-1:]
    bench = LayerTimer(collectives, plain, weight, numbers[-1])
    matmul = Times.measured(list(zip(numbers, bench.seconds([bench.matmul(rows) for rows in numbers]), strict=True)))
    sums = {
        name: Times.measured(
            list(zip(numbers, bench.seconds([bench.all_reduce(name, rows) for rows in numbers]), strict=True))
        )
        for name in collectives
    }
    return Choice(tuple(_trial(bench, rows, matmul, sums) for rows in tried))


def row_counts(most: int) -> list[int]:
    """The granule and its doubles, the last of which has ``most`` rows or more."""
    numbers = [GRANULE]
    while numbers[-1] < most:
        numbers.append(2 * numbers[-1])
    return numbers


def slowdown(matmul: Times, all_reduce: Times, blocks: Sequence[int], part: float) -> float:
    """How many times as long both lanes take beside each other, 1 to ``MOST_SLOWDOWN``.

    Args:
        blocks: rows of a cut that was tried.
        part: its time, where that of the same rows in one block is 1. Both are compared with what the model says of
            both, so that what it leaves out of both (cold caches) is left out.
    """
    low, high = 1.0, MOST_SLOWDOWN
    whole = matmul(sum(blocks)) + all_reduce(sum(blocks))
    for _ in range(30):
        middle = (low + high) / 2
        if Pipeline(matmul, all_reduce, middle, middle).seconds(blocks) > part * whole:
            high = middle
        else:
            low = middle
    return low


def _trial(bench: LayerTimer, rows: int, matmul: Times, sums: Mapping[str, Times]) -> Trial:
    """Two rounds of candidates: the model's, and the model's after what the first round has taught it."""
    first = _distinct((name, plan(rows, Pipeline(matmul, times)).blocks) for name, times in sums.items())
    first = _distinct([*first, *((name, even(rows, 2)) for name in sums)])
    plain_seconds, *took = bench.seconds([bench.plain(rows), *(bench.cut(*one) for one in first)])
    learned = []
    for (name, blocks), seconds in zip(first, took, strict=True):
        slow = slowdown(matmul, sums[name], blocks, seconds / (matmul(rows) + sums[name](rows)))
        learned.append((name, plan(rows, Pipeline(matmul, sums[name], slow, slow)).blocks))
    best = [one for _, one in sorted(zip(took, first, strict=True), key=lambda pair: pair[0])[:2]]
    final = _distinct([*best, *learned])
    plain_seconds, *took = bench.seconds([bench.plain(rows), *(bench.cut(*one) for one in final)])
    hideable = min(matmul(rows), next(iter(sums.values()))(rows))
    seconds, (name, blocks) = min(zip(took, final, strict=True), default=(plain_seconds, ("", (rows,))))
    if seconds > (1 - LEAST_GAIN) * plain_seconds:
        return Trial(rows, "", (rows,), plain_seconds, plain_seconds, hideable)
    return Trial(rows, name, blocks, seconds, plain_seconds, hideable)


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """In order, of several blocks each."""
    return [one for one in dict.fromkeys(candidates) if len(one[1]) > 1]
