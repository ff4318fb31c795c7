"""Times the parts and splits of one layer on all ranks: with events on a GPU or NPU, with the clock on a CPU."""

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
"""Number of rounds, of which the median counts. A sum waits for the slowest rank, and some rank is always slowest."""
CYCLES = 2e9
"""Clock cycles of a GPU per second, or slightly more."""
HEAD_START, LONGEST_HEAD_START = 2e-3, 0.1
"""Seconds that a GPU sleeps before the timed work, so that Python has launched all of it before it begins. If that is
longer: twice the launch time of the previous round. Launching eight blocks takes 1 to 4 ms."""
HEAD_START_MATMULS = 4
"""Number of matmuls with the most rows that keep an NPU busy instead, because torch_npu cannot make it sleep."""
STUCK = 60.0
"""Seconds after which a GPU is considered stuck, because the ranks wait for each other."""

Work = Callable[[], object]


class OutOfTimeError(Exception):
    """Some rank has no time left for measuring. All ranks raise this at the same point."""


@dataclass(frozen=True)
class Timed:
    """The times of one piece of work in seconds, as means over the ranks."""

    seconds: float
    """From beginning to end, with everything launched in advance."""
    enqueue_seconds: float
    """The time that Python takes to launch it; 0 on a CPU, where it is part of the time above."""

    @property
    def effective_seconds(self) -> float:
        """The time in a sequence of layers, where a GPU that is faster than its launches waits for them."""
        return max(self.seconds, self.enqueue_seconds)


class LayerTimer:
    """Times the parts of one layer."""

    def __init__(
        self,
        collectives: Mapping[str, Collective],
        plain: Linear,
        weight: torch.Tensor,
        rows: int,
        budget: float = float("inf"),
    ) -> None:
        """``budget``: seconds until :meth:`timed` raises. The shortest budget of all ranks counts."""
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
        """Like :meth:`timed`, without launch times."""
        return [one.seconds for one in self.timed(works, rounds, rank)]

    def timed(self, works: Sequence[Work], rounds: int = ROUNDS, rank: float = 0.5) -> list[Timed]:
        """Run each work several times in turn, and return its median time (or the quantile ``rank``).

        All ranks begin together, and the result is the mean over the ranks.

        Raises:
            OutOfTimeError: some rank has no time left; raised on all ranks.
            CollectiveError: a rank has ended, or the ranks' GPUs wait for each other.
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
        """``enqueue_seconds``: launch time of the previous round in seconds."""
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
    """Wait for an event of a GPU or NPU.

    Raises:
        CollectiveError: the event has not happened within ``STUCK`` seconds.
    """
    until = monotonic() + STUCK
    while not event.query():
        if monotonic() > until:
            raise CollectiveError(
                f"timing a layer did not finish within {STUCK:.0f} s, because the ranks' devices wait for each other; "
                'start with tiling_all_reduce "off" or with a fixed number of blocks.'
            )
        time.sleep(20e-6)


def _go_on(together: torch.Tensor) -> None:
    if together.item() > 0:
        raise OutOfTimeError


def _quantile(times: list[float], rank: float) -> float:
    return statistics.median(times) if rank == 0.5 else sorted(times)[round(rank * (len(times) - 1))]
