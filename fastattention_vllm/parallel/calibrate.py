"""How long a layer's matmul and all-reduce take on these ranks, alone and beside each other."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from fastattention_vllm.parallel.collective import Collective
from fastattention_vllm.parallel.pipeline import Pipeline, Times
from fastattention_vllm.parallel.plan import GRANULE, plan
from fastattention_vllm.parallel.tiled_linear import multiply_and_sum

ROUNDS = 5
"""Of which the middle one counts: a sum waits for the slowest rank, and some rank is always the slowest."""
MOST_SLOWDOWN = 8.0


def measure(collective: Collective, weight: torch.Tensor, most_rows: int) -> Pipeline:
    """Time layers of ``weight`` ([outputs, inputs]) for up to ``most_rows`` rows; takes some 30 times the longest one.

    Every rank of the group calls this with a weight of the same shape and gets the same answer: the ranks' mean.

    Raises:
        CollectiveError: a rank is gone, or has not answered in time.
    """
    numbers = row_counts(most_rows)
    x = weight.new_empty(numbers[-1], weight.shape[1]).uniform_(-1, 1)  # zeros would let a GPU run cool and fast
    out = weight.new_zeros(numbers[-1], weight.shape[0])

    def multiply(rows: int) -> None:
        torch.mm(x[:rows], weight.t(), out=out[:rows])

    def reduce(rows: int) -> None:
        collective.wait(collective.start(out[:rows]))

    def seconds(*works: Callable[[], object]) -> list[float]:
        return _agreed(_seconds(works, collective, weight), collective, weight.device)

    alone = [seconds(functools.partial(multiply, rows), functools.partial(reduce, rows)) for rows in numbers]
    matmul = Times.measured([(rows, times[0]) for rows, times in zip(numbers, alone, strict=True)])
    all_reduce = Times.measured([(rows, times[1]) for rows, times in zip(numbers, alone, strict=True)])
    # What the lanes take from each other shows in the cut that would be best if they took nothing.
    whole, cut = (numbers[-1],), plan(numbers[-1], Pipeline(matmul, all_reduce)).blocks
    if len(cut) == 1:
        return Pipeline(matmul, all_reduce)
    tried = [functools.partial(multiply_and_sum, x, weight, None, out, blocks, collective) for blocks in (whole, cut)]
    whole_seconds, cut_seconds = seconds(*tried)
    slow = slowdown(matmul, all_reduce, cut, cut_seconds / whole_seconds)
    return Pipeline(matmul, all_reduce, slow, slow)


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


def _agreed(seconds: Sequence[float], collective: Collective, device: torch.device) -> list[float]:
    """The ranks' means."""
    total = torch.tensor(seconds, dtype=torch.float64, device=device)
    collective.wait(collective.start(total))
    means: list[float] = (total / collective.size).tolist()
    return means


def _seconds(works: Sequence[Callable[[], object]], collective: Collective, like: torch.Tensor) -> list[float]:
    """The middle one of a few times for each, in turns; all ranks begin together."""
    found: list[list[float]] = [[] for _ in works]
    for _ in range(ROUNDS):
        for work, times in zip(works, found, strict=True):
            collective.wait(collective.start(like.new_zeros(1)))
            _finish(like.device)
            started = time.perf_counter()
            work()
            _finish(like.device)
            times.append(time.perf_counter() - started)
    return [statistics.median(times) for times in found]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
