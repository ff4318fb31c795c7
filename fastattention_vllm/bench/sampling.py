"""What every measurement shares: samples and their median, whose turn it is, and which copy of a cache comes next.

Used by: measure.py, memory.py, gpu.py and the benchmarks that take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Samples:
    """Seconds per call."""

    clean: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)
    """Samples during which other processes took too much of the machine."""

    @property
    def used(self) -> list[float]:
        """The clean samples, or all if there is no clean one."""
        return self.clean or self.disturbed

    @property
    def median(self) -> float:
        return statistics.median(self.used)

    @property
    def iqr(self) -> float:
        """Interquartile range over the median."""
        if len(self.used) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.used, n=4, method="inclusive")
        return (third - first) / self.median


@dataclass(slots=True)
class Rotation:
    """Copies of a KV cache that all contenders use in turn: none finds in a CPU cache what another has just read."""

    layers: int
    note: str | None = None
    """A sentence if memory did not allow as many copies as wanted."""
    _next: int = field(default=0, compare=False, repr=False)

    def next(self) -> int:
        layer = self._next
        self._next = (layer + 1) % self.layers
        return layer


def in_turn(contenders: Sequence[T], number: int) -> Sequence[T]:
    """The order of round ``number``: every other round runs backwards, so that slow drift favours nobody."""
    return contenders if number % 2 == 0 else contenders[::-1]
