"""How full the KV cache was during the last hour."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

INTERVAL_S = 10.0
KEPT_S = 3600.0


class UsagePoint(BaseModel):
    """The KV cache during one interval. Intervals without a step of the engine have no point."""

    model_config = ConfigDict(frozen=True)

    seconds_ago: float
    """From the start of the interval until now."""
    highest: float
    """Highest fraction of blocks in use, 0 to 1."""
    last: float
    """The fraction in use at the end of the interval. It stays until the next point."""


class UsageHistory:
    """Keeps one point per interval, so its size does not depend on the number of steps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._intervals: deque[list[float]] = deque(maxlen=int(KEPT_S / INTERVAL_S))

    def add(self, fraction: float) -> None:
        began = self._clock() // INTERVAL_S * INTERVAL_S
        if not self._intervals or self._intervals[-1][0] != began:
            self._intervals.append([began, fraction, fraction])
        interval = self._intervals[-1]
        interval[1:] = [max(interval[1], fraction), fraction]

    @property
    def last(self) -> float | None:
        """None before the first step of the engine."""
        return self._intervals[-1][2] if self._intervals else None

    def points(self) -> list[UsagePoint]:
        """The oldest first. The point before the last hour is among them if the hour began without steps."""
        now = self._clock()
        points = [
            UsagePoint(seconds_ago=round(now - began, 1), highest=round(highest, 4), last=round(last, 4))
            for began, highest, last in self._intervals
        ]
        old = [point for point in points if point.seconds_ago > KEPT_S]
        return old[-1:] + [point for point in points if point.seconds_ago <= KEPT_S]
