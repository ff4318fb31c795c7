"""Runs the three programs of an AI core together: the cube's, and the same one on both vector cores."""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from kernels.ascend.core import Core
from kernels.ascend.pipes import DeadlockError
from kernels.ascend.tables import Chip, Tables
from kernels.ascend.text import Statement, body_of
from kernels.ascend.values import Numbers, Values

Bodies = Mapping[str, tuple[Statement, ...]]
"""The statements of the programs "AIC" and "AIV"; a program without products has only the second."""


@dataclass(frozen=True)
class Launch:
    """What one program is called with. The keys are the compiler's names, such as ``%arg3``."""

    arguments: Mapping[str, int]
    arrays: Mapping[str, Numbers]
    block: int = 0
    """Number of the program in its grid."""
    cached: bool = True
    """Keys and values come from the L2 cache instead of global memory."""


@dataclass(frozen=True)
class Predicted:
    cycles: float
    busy: dict[str, float]
    """Cycles by core and pipe, as in "AIC FIX". Of the two vector cores, the first."""
    moved: dict[str, float]
    """Bytes by path, of all three cores."""
    counts: dict[str, int]
    """Executed instructions by core and name, as in "AIV vexp". Of the two vector cores, the first."""
    vector_cycles: dict[str, float]
    """Of the first vector core, by instruction."""
    left_over: int
    """Flags that were set more often than waited for. Not 0 means that the program is wrong."""


def bodies(programs: Mapping[str, str]) -> Bodies:
    """``programs``: the printed function of each core."""
    return {kind: _body(text) for kind, text in programs.items()}


@functools.lru_cache(maxsize=64)
def _body(text: str) -> tuple[Statement, ...]:
    return body_of(text)


class _Flags:
    """Between the cores. The cube goes on when both vector cores have set a flag; its own flags go to both."""

    def __init__(self) -> None:
        self.set: defaultdict[tuple[str, int, int], deque[float]] = defaultdict(deque)

    def send(self, kind: str, number: int, flag: int, time: float) -> None:
        for receiver in [("AIV", 0), ("AIV", 1)] if kind == "AIC" else [("AIC", number)]:
            self.set[(*receiver, flag)].append(time)

    def take(self, kind: str, number: int, flag: int) -> float | None:
        queues = [self.set[kind, one, flag] for one in ((0, 1) if kind == "AIC" else (number,))]
        return max(queue.popleft() for queue in queues) if all(queues) else None


def simulate(programs: Bodies, launch: Launch, chip: Chip, tables: Tables) -> Predicted:
    """Follow one program from its start to its end.

    Raises:
        DeadlockError: a core waits for a flag that nothing sets.
        ValueError: an instruction is not known.
    """
    flags = _Flags()
    places = [("AIC", 0), ("AIV", 0), ("AIV", 1)] if "AIC" in programs else [("AIV", 0), ("AIV", 1)]
    cores = [
        Core(
            *place,
            chip,
            tables,
            Values(launch.arguments, launch.arrays),
            block=launch.block,
            cached=launch.cached,
            send=functools.partial(flags.send, *place),
            take=functools.partial(flags.take, *place),
        )
        for place in places
    ]
    running = [(core, core.run(programs[core.kind])) for core in cores]
    while running:
        steps = sum(core.steps for core in cores)
        still = [(core, run) for core, run in running if next(run, "ended") is None]
        if still and len(still) == len(running) and steps == sum(core.steps for core in cores):
            waiting = ", ".join(f"{core.kind} {core.number}" for core, _ in still)
            raise DeadlockError(f"the cores {waiting} wait for flags that none of them sets.")
        running = still
    first = [core for core in cores if core.number == 0]
    moved: defaultdict[str, float] = defaultdict(float)
    for core in cores:
        for path, size in core.moved.items():
            moved[path] += size
    return Predicted(
        max(core.pipes.end() for core in cores),
        {f"{core.kind} {pipe}": cycles for core in first for pipe, cycles in core.pipes.busy.items()},
        dict(moved),
        {f"{core.kind} {name}": count for core in first for name, count in core.counts.items()},
        dict(next(core for core in first if core.kind == "AIV").by_instruction),
        sum(map(len, flags.set.values())) + sum(core.pipes.left_over() for core in cores),
    )
