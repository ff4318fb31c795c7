"""What was found fastest for a layer, and what to do with a number of rows that was not tried."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from fastattention_vllm.parallel.plan import GRANULE, cut


@dataclass(frozen=True)
class Trial:
    """The best of what was timed for so many rows; one block where no cut was enough faster."""

    rows: int
    collective: str
    """By which it was; "" for the plain layer. With one block, the name of one call that does the whole layer."""
    blocks: tuple[int, ...]
    seconds: float
    plain_seconds: float
    hideable_seconds: float
    """The shorter one of the plain layer's matmul and all-reduce, each alone."""

    def __post_init__(self) -> None:
        if sum(self.blocks) != self.rows or min(self.blocks) < 1:
            raise ValueError(f"blocks of {self.blocks} rows do not add up to {self.rows}.")

    @property
    def hidden(self) -> float:
        """Part of what can be hidden that is; above 1 where the collective is also faster than the plain one."""
        return (self.plain_seconds - self.seconds) / self.hideable_seconds


@dataclass(frozen=True)
class Choice:
    """Of one layer on one group of ranks."""

    trials: tuple[Trial, ...]
    """By ascending rows."""

    def of(self, rows: int) -> tuple[str, tuple[int, ...]]:
        """The collective, or the name of one call, and the blocks; "" and one block for the plain layer.

        Between two numbers that were tried, both of which must have gained, as in the nearer one. Fewer rows than were
        ever tried are not cut.
        """
        return _of(self, rows)


@functools.lru_cache(maxsize=8192)
def _of(choice: Choice, rows: int) -> tuple[str, tuple[int, ...]]:
    plain = "", (rows,) if rows else ()
    below = [trial for trial in choice.trials if trial.rows <= rows]
    above = [trial for trial in choice.trials if trial.rows >= rows]
    if not below:
        return plain
    near = [below[-1], above[0]] if above else [below[-1]]
    if any(not trial.collective for trial in near):
        return plain
    nearest = min(near, key=lambda trial: abs(trial.rows - rows))
    return nearest.collective, _scaled(nearest.blocks, rows)


def _scaled(blocks: Sequence[int], rows: int) -> tuple[int, ...]:
    return tuple(blocks) if sum(blocks) == rows else cut(rows, blocks, GRANULE)
