"""The fastest splits of a layer, and how they apply to numbers of rows that were not measured."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from fastattention_vllm.parallel.plan import GRANULE, cut


@dataclass(frozen=True)
class Trial:
    """The best measured split for a number of rows. One block if no split was clearly faster."""

    rows: int
    collective: str
    """The name of the collective; "" for the plain layer. With one block, the name of a fused call for the layer."""
    blocks: tuple[int, ...]
    seconds: float
    plain_seconds: float
    hideable_seconds: float
    """The shorter of the plain layer's matmul and all-reduce times, each measured alone."""

    def __post_init__(self) -> None:
        if sum(self.blocks) != self.rows or min(self.blocks) < 1:
            raise ValueError(f"blocks of {self.blocks} rows do not add up to {self.rows}.")

    @property
    def hidden(self) -> float:
        """The fraction of the hideable time that is hidden. Above 1 if the collective beats the plain one, too."""
        return (self.plain_seconds - self.seconds) / self.hideable_seconds


@dataclass(frozen=True)
class Choice:
    """The choices for one layer on one group of ranks."""

    trials: tuple[Trial, ...]
    """In ascending order of rows."""

    def of(self, rows: int) -> tuple[str, tuple[int, ...]]:
        """The collective (or the name of a fused call) and the blocks; "" and one block for the plain layer.

        Between two measured numbers of rows, the nearer one decides, and both must have gained. Fewer rows than the
        smallest measured number are not split.
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
