"""The pipes of one core, and the flags that order them. Times are cycles.

Pipes: MTE1 (L1 to L0), MTE2 (into L1 or UB), MTE3 (out of UB), M (the cube), FIX (out of L0C), V (vector instructions),
S (the scalar unit, which hands the others their instructions).
"""

from __future__ import annotations

from collections import defaultdict, deque

Flag = tuple[str, str, int]
"""The pipe that sets it, the pipe that waits for it, and its number."""


class DeadlockError(Exception):
    """One sentence: which core waits for what."""


class Pipes:
    def __init__(self) -> None:
        self.scalar = 0.0
        """Until when the scalar unit is busy."""
        self.free: defaultdict[str, float] = defaultdict(float)
        """Pipe -> when it can start its next instruction."""
        self.done: defaultdict[str, float] = defaultdict(float)
        """Pipe -> when its results are in their place."""
        self.busy: defaultdict[str, float] = defaultdict(float)
        self.flags: defaultdict[Flag, deque[float]] = defaultdict(deque)

    def run(self, pipe: str, cycles: float, latency: float = 0.0) -> float:
        """One instruction. Returns when the pipe is free again."""
        self.free[pipe] = max(self.scalar, self.free[pipe]) + cycles
        self.done[pipe] = max(self.done[pipe], self.free[pipe] + latency)
        self.busy[pipe] += cycles
        return self.free[pipe]

    def not_before(self, pipe: str, time: float) -> None:
        if pipe == "S":
            self.scalar = max(self.scalar, time)
        else:
            self.free[pipe] = max(self.free[pipe], time)

    def reached(self, pipe: str) -> float:
        """When everything that was handed to the pipe is done."""
        return max(self.done[pipe], self.free[pipe], self.scalar if pipe == "S" else 0.0)

    def set(self, flag: Flag) -> None:
        self.flags[flag].append(self.reached(flag[0]))

    def wait(self, flag: Flag) -> None:
        """Hold up the flag's second pipe. Raises ``DeadlockError`` if nothing sets it."""
        if not self.flags[flag]:
            raise DeadlockError(f"pipe {flag[1]} waits for flag {flag[2]} of pipe {flag[0]}, which was not set.")
        self.not_before(flag[1], self.flags[flag].popleft())

    def barrier(self, pipe: str) -> None:
        for each in list(self.free) if pipe == "ALL" else [pipe]:
            self.not_before(each, self.reached(each))
        if pipe == "ALL":
            self.scalar = self.end()

    def end(self) -> float:
        return max([self.scalar, *self.free.values(), *self.done.values()])

    def left_over(self) -> int:
        """Flags that were set more often than waited for."""
        return sum(map(len, self.flags.values()))
