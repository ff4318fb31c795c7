"""How long a layer's matmul and all-reduce take on these ranks, alone and beside each other."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fastattention_vllm.parallel.collective import Collective
from fastattention_vllm.parallel.pipeline import Pipeline, Times
from fastattention_vllm.parallel.plan import GRANULE

ROUNDS = 4
"""Of which the fastest counts: what else the machine does comes and goes."""


def measure(collective: Collective, weight: torch.Tensor, most_rows: int) -> Pipeline:
    """Time layers of ``weight`` ([outputs, inputs]) for up to ``most_rows`` rows; takes some ten times the longest one.

    Every rank of the group calls this with a weight of the same shape and gets the same answer: the ranks' mean.

    Raises:
        CollectiveError: a rank is gone, or has not answered in time.
    """
    numbers = row_counts(most_rows)
    x = weight.new_empty(numbers[-1], weight.shape[1]).uniform_(-1, 1)  # zeros would let a GPU run cool and fast
    out = weight.new_zeros(numbers[-1], weight.shape[0])
    other = torch.zeros_like(out)

    def multiply(rows: int) -> None:
        torch.mm(x[:rows], weight.t(), out=out[:rows])

    def reduce(rows: int) -> None:
        collective.wait(collective.start(other[:rows]))

    def both(rows: int) -> None:
        started = collective.start(other[:rows])
        multiply(rows)
        collective.wait(started)

    together = _seconds(both, numbers[-1], collective, weight)
    seconds = [_seconds(lane, rows, collective, weight) for lane in (multiply, reduce) for rows in numbers]
    agreed = torch.tensor([together, *seconds], dtype=torch.float64, device=weight.device)
    collective.wait(collective.start(agreed))
    together, *seconds = (agreed / collective.size).tolist()
    matmuls, reduces = seconds[: len(numbers)], seconds[len(numbers) :]
    slow = slowdown(matmuls[-1], reduces[-1], together)
    matmul = Times.measured(list(zip(numbers, matmuls, strict=True)))
    all_reduce = Times.measured(list(zip(numbers, reduces, strict=True)))
    return Pipeline(matmul, all_reduce, slow, slow)


def row_counts(most: int) -> list[int]:
    """The granule and its doubles, the last of which has ``most`` rows or more."""
    numbers = [GRANULE]
    while numbers[-1] < most:
        numbers.append(2 * numbers[-1])
    return numbers


def slowdown(one: float, other: float, together: float) -> float:
    """How many times as long two works take beside each other, if that is the same for both; at least 1.

    They take the times ``one`` and ``other`` alone, and ``together`` from their common start to the end of both: the
    shorter one all the while beside the longer one, whose rest then goes on alone.
    """
    shorter, longer = sorted((one, other))
    return max(1.0, 1 + (together - longer) / shorter)


def _seconds(work: Callable[[int], None], rows: int, collective: Collective, like: torch.Tensor) -> float:
    """The fastest of a few; all ranks begin together."""
    best = float("inf")
    for _ in range(ROUNDS):
        collective.wait(collective.start(like.new_zeros(1)))
        _finish(like.device)
        started = time.perf_counter()
        work(rows)
        _finish(like.device)
        best = min(best, time.perf_counter() - started)
    return best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
