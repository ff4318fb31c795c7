"""Interleaved samples: every round times everyone once, so that a machine that slows down slows everyone down.

Used by: runner.py and limits.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastattention_vllm.bench import machine
from fastattention_vllm.bench.sampling import Rotation, Samples, in_turn

SAMPLE_SECONDS = 0.1
DISTURBED = 0.03
"""A sample during which threads waited for the CPU longer than this part of the time does not count."""
PATIENCE_SECONDS = 30.0
"""How long a case waits for undisturbed samples."""
SLOW_SECONDS, HOPELESS_SECONDS = 1.5, 5.0
"""A call longer than this gets three samples, longer than that only one."""


@dataclass(slots=True)
class Subject:
    """Something to time: ``calls`` has one entry per layer, or one in all."""

    name: str
    calls: list[Callable[[], Any]]
    sample_seconds: float = SAMPLE_SECONDS
    samples: Samples = field(default_factory=Samples)
    slowest: float = 0.0

    def wants_more(self) -> bool:
        taken = len(self.samples.clean) + len(self.samples.disturbed)
        return self.slowest < SLOW_SECONDS or taken < (1 if self.slowest > HOPELESS_SECONDS else 3)

    def sample(self, rotation: Rotation, keep: bool = True) -> None:
        wait_for_quiet()
        delay, start = machine.run_delay(), time.perf_counter()
        count, elapsed = 0, 0.0
        while count == 0 or elapsed < self.sample_seconds:
            self.calls[rotation.next() if len(self.calls) > 1 else 0]()
            count += 1
            elapsed = time.perf_counter() - start
        delay = machine.run_delay() - delay
        self.slowest = max(self.slowest, elapsed / count)
        if keep or self.slowest > HOPELESS_SECONDS:
            kept = self.samples.disturbed if delay > DISTURBED * elapsed else self.samples.clean
            kept.append(elapsed / count)


def run_rounds(subjects: list[Subject], rotation: Rotation, rounds: int) -> None:
    """Sample everyone ``rounds`` times, and up to three times as often where too many samples are disturbed."""
    deadline = time.perf_counter() + PATIENCE_SECONDS
    for subject in subjects:
        subject.sample(rotation, keep=False)
    for number in range(3 * rounds):
        enough = all(len(s.samples.clean) * 2 >= rounds or not s.wants_more() for s in subjects)
        if number >= rounds and (enough or time.perf_counter() > deadline):
            return
        for subject in in_turn(subjects, number):
            if subject.wants_more():
                subject.sample(rotation)


def wait_for_quiet(limit: float = 0.3) -> None:
    """Until this process's idle threads sleep: OpenMP's spin for a while and would take the CPU from the next one."""
    deadline = time.perf_counter() + limit
    while time.perf_counter() < deadline:
        used, start = time.process_time(), time.perf_counter()
        time.sleep(0.002)
        if time.process_time() - used < 0.3 * (time.perf_counter() - start):
            return
