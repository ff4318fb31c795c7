"""Times of one layer's parts and cuts on all ranks: by events on a GPU, by the clock on a CPU."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from fastattention_vllm.parallel.collective import Collective
from fastattention_vllm.parallel.tiled_linear import Linear, multiply_and_sum

ROUNDS = 7
"""Of which the middle one counts: a sum waits for the slowest rank, and some rank is always the slowest."""
HEAD_START = 4_000_000
"""Cycles that a GPU sleeps before what is timed, some 2 ms, so that it waits for nothing that Python has yet to order:
eight blocks take it about 1 ms. In the prefill of a model Python is as far ahead after a few layers."""


class LayerTimer:
    """One layer, and how its parts are timed."""

    def __init__(self, collectives: Mapping[str, Collective], plain: Linear, weight: torch.Tensor, rows: int) -> None:
        self.collectives, self._plain, self.weight = collectives, plain, weight
        self.first = next(iter(collectives.values()))
        self.x = weight.new_empty(rows, weight.shape[1]).uniform_(-1, 1)  # zeros would let a GPU run cool and fast
        self.out = weight.new_zeros(rows, weight.shape[0])

    def matmul(self, rows: int) -> Callable[[], object]:
        return functools.partial(torch.mm, self.x[:rows], self.weight.t(), out=self.out[:rows])

    def all_reduce(self, name: str, rows: int) -> Callable[[], object]:
        collective = self.collectives[name]

        def work() -> None:
            collective.wait(collective.start(self.out[:rows]))

        return work

    def plain(self, rows: int) -> Callable[[], object]:
        return functools.partial(self._plain, self.x[:rows], self.weight, None)

    def cut(self, name: str, blocks: Sequence[int]) -> Callable[[], object]:
        rows = sum(blocks)
        x, out = self.x[:rows], self.out[:rows]
        return functools.partial(multiply_and_sum, x, self.weight, None, out, blocks, self.collectives[name])

    def seconds(self, works: Sequence[Callable[[], object]], rounds: int = ROUNDS, rank: float = 0.5) -> list[float]:
        """Of a few times for each, in turns, the middle one (or that of which ``rank`` are shorter), as the mean of all
        ranks, which begin together."""
        found: list[list[float]] = [[] for _ in works]
        for turn in range(rounds + 1):
            for step in range(len(works)):
                at = (turn + step) % len(works)  # none always comes after the same other one
                took = self._once(works[at])
                if turn:  # the first one warms up
                    found[at].append(took)
        total = torch.tensor([_quantile(times, rank) for times in found], dtype=torch.float64)
        total = total.to(self.weight.device)
        self.first.wait(self.first.start(total))
        means: list[float] = (total / self.first.size).tolist()
        return means

    def _once(self, work: Callable[[], object]) -> float:
        together = self.weight.new_zeros(1)
        if self.weight.device.type != "cuda":
            self.first.wait(self.first.start(together))
            started = time.perf_counter()
            work()
            return time.perf_counter() - started
        torch.cuda._sleep(HEAD_START)
        self.first.wait(self.first.start(together))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000


def _quantile(times: list[float], rank: float) -> float:
    return statistics.median(times) if rank == 0.5 else sorted(times)[round(rank * (len(times) - 1))]
