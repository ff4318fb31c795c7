"""Times of one layer's parts and cuts on all ranks: by events on a GPU or an NPU, by the clock on a CPU."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any

import torch

from fastattention_vllm.parallel.collective import Collective, CollectiveError
from fastattention_vllm.parallel.tiled_linear import Linear, multiply_and_sum

ROUNDS = 7
"""Of which the middle one counts: a sum waits for the slowest rank, and some rank is always the slowest."""
CYCLES = 2e9
"""Of a GPU in a second, or a little more."""
HEAD_START, LONGEST_HEAD_START = 2e-3, 0.1
"""Seconds that a GPU sleeps before what is timed, so that it waits for nothing that Python has yet to order. Twice as
long as enqueueing took the last time, if that is longer: eight blocks take 1 to 4 ms."""
HEAD_START_MATMULS = 4
"""Of the most rows, with which an NPU is kept busy instead: torch_npu has no call to let it sleep."""
STUCK = 60.0
"""Seconds after which a GPU that has not done what was timed never will: its ranks wait for each other."""

Work = Callable[[], object]


class OutOfTimeError(Exception):
    """The time to measure in is over on some rank; raised on all of them at the same work."""


@dataclass(frozen=True)
class Timed:
    """Of one work, in seconds, the mean of the ranks."""

    seconds: float
    """From its beginning to its end, all of it ordered before."""
    enqueue_seconds: float
    """In which Python orders it; 0 on a CPU, where that is part of the above."""

    @property
    def effective_seconds(self) -> float:
        """What it takes where layer follows layer: a GPU that is faster than its orders waits for them."""
        return max(self.seconds, self.enqueue_seconds)


class LayerTimer:
    """One layer, and how its parts are timed."""

    def __init__(
        self,
        collectives: Mapping[str, Collective],
        plain: Linear,
        weight: torch.Tensor,
        rows: int,
        budget: float = float("inf"),
    ) -> None:
        """``budget``: seconds from now on, after which :meth:`timed` raises; the shortest one of the ranks counts."""
        self._until = monotonic() + budget
        self.collectives, self._plain, self.weight = collectives, plain, weight
        self.first = next(iter(collectives.values()))
        self.x = weight.new_empty(rows, weight.shape[1]).uniform_(-1, 1)  # zeros would let a GPU run cool and fast
        self.out = weight.new_zeros(rows, weight.shape[0])

    def matmul(self, rows: int) -> Work:
        return functools.partial(torch.mm, self.x[:rows], self.weight.t(), out=self.out[:rows])

    def all_reduce(self, name: str, rows: int) -> Work:
        collective = self.collectives[name]

        def work() -> None:
            collective.wait(collective.start(self.out[:rows]))

        return work

    def plain(self, rows: int) -> Work:
        return functools.partial(self._plain, self.x[:rows], self.weight, None)

    def cut(self, name: str, blocks: Sequence[int]) -> Work:
        rows = sum(blocks)
        x, out = self.x[:rows], self.out[:rows]
        return functools.partial(multiply_and_sum, x, self.weight, None, out, blocks, self.collectives[name])

    def seconds(self, works: Sequence[Work], rounds: int = ROUNDS, rank: float = 0.5) -> list[float]:
        """As :meth:`timed`, without the time to enqueue."""
        return [one.seconds for one in self.timed(works, rounds, rank)]

    def timed(self, works: Sequence[Work], rounds: int = ROUNDS, rank: float = 0.5) -> list[Timed]:
        """Of a few times for each, in turns, the middle one (or that of which ``rank`` are shorter), as the mean of all
        ranks, which begin together.

        Raises:
            OutOfTimeError: the budget of some rank is over, on all ranks.
            CollectiveError: a rank is gone, or the ranks' GPUs wait for each other.
        """
        found: list[list[Timed]] = [[] for _ in works]
        enqueue_seconds = [0.0] * len(works)
        for turn in range(rounds + 1):
            for step in range(len(works)):
                at = (turn + step) % len(works)  # none always comes after the same other one
                took = self._once(works[at], enqueue_seconds[at])
                enqueue_seconds[at] = took.enqueue_seconds
                if turn:  # the first one warms up
                    found[at].append(took)
        seconds = [_quantile([one.seconds for one in times], rank) for times in found]
        orders = [_quantile([one.enqueue_seconds for one in times], rank) for times in found]
        means = [total / self.first.size for total in self.first.totals([*seconds, *orders], self.weight.device)]
        return [Timed(*both) for both in zip(means[: len(works)], means[len(works) :], strict=True)]

    def _once(self, work: Work, enqueue_seconds: float) -> Timed:
        """``enqueue_seconds``: seconds that it took the last time."""
        # What the ranks wait for each other with also says whether one of them has no time left.
        together = self.weight.new_full((1,), float(monotonic() > self._until))
        if self.weight.device.type == "cpu":
            self.first.wait(self.first.start(together))
            _go_on(together)
            started = perf_counter()
            work()
            return Timed(perf_counter() - started, 0.0)
        self._give_head_start(enqueue_seconds)
        self.first.wait(self.first.start(together))
        device = torch.get_device_module(self.weight.device)
        begin, end = (device.Event(enable_timing=True) for _ in range(2))
        begin.record()
        started = perf_counter()
        work()
        ordered = perf_counter() - started
        end.record()
        wait_for(end)
        _go_on(together)
        milliseconds: float = begin.elapsed_time(end)
        return Timed(milliseconds / 1000, ordered)

    def _give_head_start(self, enqueue_seconds: float) -> None:
        if self.weight.device.type == "cuda":
            torch.cuda._sleep(int(CYCLES * min(LONGEST_HEAD_START, max(HEAD_START, 2 * enqueue_seconds))))
            return
        longest = self.matmul(len(self.x))
        for _ in range(HEAD_START_MATMULS):
            longest()


def wait_for(event: Any) -> None:
    """Until an event of a GPU or an NPU has come.

    Raises:
        CollectiveError: it has not within ``STUCK`` seconds.
    """
    until = monotonic() + STUCK
    while not event.query():
        if monotonic() > until:
            raise CollectiveError(
                f"a layer that was timed is not done after {STUCK:.0f} s: its ranks' devices wait for each other. "
                'Start with tiling_all_reduce "off", or with a fixed number of blocks.'
            )
        time.sleep(20e-6)


def _go_on(together: torch.Tensor) -> None:
    if together.item() > 0:
        raise OutOfTimeError


def _quantile(times: list[float], rank: float) -> float:
    return statistics.median(times) if rank == 0.5 else sorted(times)[round(rank * (len(times) - 1))]
