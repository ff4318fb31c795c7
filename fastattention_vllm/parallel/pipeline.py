"""A model of the time that a row-parallel linear layer takes in blocks of rows.

Two stages work at the same time. The matmul stage multiplies one block after the other. The all-reduce stage sums a
block over the ranks when the block has been multiplied and the previous blocks have been summed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """The time for a number of rows in seconds, interpolated linearly between measured points.

    Fewer rows than the first point take as long as that point, because nothing smaller was measured. More rows than the
    last point continue at the slope of the last segment.
    """

    points: tuple[tuple[int, float], ...]
    """(rows, seconds) in ascending order of rows. Seconds never decrease."""

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("at least one measured point is needed.")
        before = (0, 0.0)
        for rows, seconds in self.points:
            if rows <= before[0] or not max(before[1], 1e-12) <= seconds < float("inf"):
                raise ValueError(f"{seconds} s for {rows} rows follow {before[1]} s for {before[0]}; both must rise.")
            before = rows, seconds

    @classmethod
    def measured(cls, points: Sequence[tuple[int, float]]) -> Times:
        """From measurements in any order. If more rows seem faster than fewer rows, that is noise and is corrected."""
        lifted: list[tuple[int, float]] = []
        for rows, seconds in sorted(points):
            lifted.append((rows, max(seconds, lifted[-1][1]) if lifted else seconds))
        return cls(tuple(lifted))

    def __call__(self, rows: int) -> float:
        if rows <= 0:
            return 0.0
        last = len(self.points) - 1
        at = bisect_right(self.points, rows, key=lambda point: point[0]) - 1
        if at < 0:
            return self.points[0][1]
        if last == 0:
            return self.points[0][1] * rows / self.points[0][0]
        left = min(at, last - 1)
        (rows0, seconds0), (rows1, seconds1) = self.points[left : left + 2]
        return seconds0 + (seconds1 - seconds0) * (rows - rows0) / (rows1 - rows0)


@dataclass(frozen=True)
class Pipeline:
    """The two stages of one linear layer on one group of ranks."""

    matmul: Times
    all_reduce: Times
    matmul_slowdown: float = 1.0
    """Factor by which a running all-reduce slows a matmul down. Both share memory bandwidth and cores."""
    all_reduce_slowdown: float = 1.0
    """Factor by which a running matmul slows an all-reduce down."""

    def __post_init__(self) -> None:
        if min(self.matmul_slowdown, self.all_reduce_slowdown) < 1:
            raise ValueError(
                f"slowdowns of {self.matmul_slowdown} and {self.all_reduce_slowdown} must be at least 1: "
                "overlapped work is never faster."
            )

    @property
    def slows_down(self) -> bool:
        """Whether the stages slow each other down."""
        return max(self.matmul_slowdown, self.all_reduce_slowdown) > 1

    def seconds(self, blocks: Sequence[int]) -> float:
        """From the beginning of the first block's matmul to the end of the last block's all-reduce.

        Args:
            blocks: rows per block, in the order of their computation.
        """
        matmuls = [self.matmul(rows) for rows in blocks]
        reduces = [self.all_reduce(rows) for rows in blocks]
        clock = 0.0
        multiplied = reduced = 0
        while reduced < len(blocks):
            multiplying, reducing = multiplied < len(blocks), reduced < multiplied
            # What each stage's present block has left is kept as seconds alone in the world.
            slow = (self.matmul_slowdown, self.all_reduce_slowdown) if multiplying and reducing else (1.0, 1.0)
            to_multiply = matmuls[multiplied] * slow[0] if multiplying else float("inf")
            to_reduce = reduces[reduced] * slow[1] if reducing else float("inf")
            step = min(to_multiply, to_reduce)
            clock += step
            if multiplying:
                matmuls[multiplied] = max(0.0, (to_multiply - step) / slow[0])
            if reducing:
                reduces[reduced] = max(0.0, (to_reduce - step) / slow[1])
            multiplied += multiplying and to_multiply == step
            reduced += reducing and to_reduce == step
        return clock

    def hideable(self, rows: int) -> float:
        """The upper bound of the seconds that blocks can save: the time of the shorter stage."""
        return min(self.matmul(rows), self.all_reduce(rows))

    def link_bound(self, rows: int) -> bool:
        """Whether the all-reduce takes longer than the matmul."""
        return self.all_reduce(rows) > self.matmul(rows)
