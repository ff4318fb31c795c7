"""Into how many blocks of rows a row-parallel linear layer is cut, and how large each is.

While one block is summed over the ranks, the next ones are multiplied; nothing hides the first block's matmul and the
last one's all-reduce. Which of these two to make small follows from which stage is the longer one:

- The link is the bottleneck: a small first block, so that the link starts early. The paper (arXiv 2410.16663, section
  4.2) gives "the first block a smaller task"; CANN's matmul-all-reduce does the same and calls it "short at front".
- The matmul is: a small last block, so that little is left to sum at the end; CANN's "short at end".

Both are cases of Johnson's rule for two machines in a row (S. M. Johnson, Naval Research Logistics Quarterly 1, 1954):
of given blocks, those that take the first machine shorter go first in ascending order, the others follow in descending
order. Between the ends a block should be multiplied in the time in which the one before is summed. With a time per row
of g for the matmul and a for the all-reduce this makes each block a/g times as large as the one before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastattention_vllm.parallel.pipeline import Pipeline

GRANULE = 128
"""Rows: the height of a matmul kernel's tile on most devices. A block that is not a multiple wastes a part of one."""
COUNTS = (*range(2, 11), 12, 16)
"""Of blocks. More than 16 leave little to be hidden, and each costs a launch and a message."""
RATIOS = ((1, 1), (5, 4), (3, 2), (2, 1), (3, 1), (4, 1), (6, 1))
"""Of a block to its smaller neighbour, as fractions."""
SHORT_ENDS = (2, 4)
"""How many times smaller the one small block is among equal ones."""
MIN_GAIN = 0.03
"""Part of the time of one block that several must save: models are not exact, and a plan must never lose."""
MIN_CHANGE = 0.002
"""Part of a plan's time that another one must save to be taken instead: the search tries those of few blocks first."""


@dataclass(frozen=True)
class Plan:
    """Blocks of rows, in order, and what the model says of them."""

    blocks: tuple[int, ...]
    """Rows of each; none for no rows. All but the last are multiples of the granule."""
    seconds: float
    """Predicted."""
    one_block_seconds: float
    hideable_seconds: float

    @property
    def hidden(self) -> float:
        """Part of what can be hidden that is, 0 to 1."""
        return (self.one_block_seconds - self.seconds) / self.hideable_seconds if self.hideable_seconds else 0.0


@functools.lru_cache(maxsize=8192)
def plan(rows: int, pipeline: Pipeline, granule: int = GRANULE) -> Plan:
    """The blocks with the shortest predicted time; one block unless several save ``MIN_GAIN``.

    The same on every rank that is given the same numbers, which ranks must agree on first: cuts are made in integers,
    and times are compared by additions and multiplications that round alike everywhere.
    """
    if rows <= 0:
        return Plan((), 0.0, 0.0, 0.0)
    missing = -rows % granule
    *others, last = _best_of_several(rows + missing, pipeline, granule)
    blocks: tuple[int, ...] = (*others, last - missing)
    seconds, one_block_seconds = pipeline.seconds(blocks), pipeline.seconds((rows,))
    if seconds > (1 - MIN_GAIN) * one_block_seconds:
        blocks, seconds = (rows,), one_block_seconds
    return Plan(blocks, seconds, one_block_seconds, pipeline.hideable(rows))


def even(rows: int, count: int, granule: int = GRANULE) -> tuple[int, ...]:
    """``count`` blocks as equal as the granule allows; fewer where there are not so many granules."""
    return cut(rows, [1] * count, granule)


def cut(rows: int, weights: Sequence[int], granule: int) -> tuple[int, ...]:
    """Blocks in proportion to ``weights``, rounded to granules; those that would be empty are left out."""
    granules, total = -(-rows // granule), sum(weights)
    blocks, done, weight_done = [], 0, 0
    for weight in weights:
        weight_done += weight
        end = min(rows, (2 * granules * weight_done + total) // (2 * total) * granule)
        if end > done:
            blocks.append(end - done)
            done = end
    return tuple(blocks)


@functools.lru_cache(maxsize=1024)
def _best_of_several(rows: int, pipeline: Pipeline, granule: int) -> tuple[int, ...]:
    """For a multiple of the granule, so that all lengths of a server's batches are few searches (2 ms each)."""
    best: tuple[int, ...] = (rows,)
    seconds = float("inf")
    for weights in _shapes(rows // granule):
        ordered = _in_johnsons_order(cut(rows, weights, granule), pipeline)
        # The rule knows nothing of stages that slow each other down, which may turn the order round.
        for blocks in (ordered, ordered[::-1]) if pipeline.slows_down else (ordered,):
            predicted = pipeline.seconds(blocks)
            if predicted < (1 - MIN_CHANGE) * seconds:
                best, seconds = blocks, predicted
    return best


def _shapes(maximum: int) -> Iterator[list[int]]:
    """Sizes in proportion: equal ones, each larger than the one before, and one small one among equal ones."""
    for count in COUNTS:
        if count > maximum:
            return
        yield from ([up**i * down ** (count - 1 - i) for i in range(count)] for up, down in RATIOS)
        yield from ([1, *[times] * (count - 1)] for times in SHORT_ENDS)


def _in_johnsons_order(blocks: Sequence[int], pipeline: Pipeline) -> tuple[int, ...]:
    rising = sorted(block for block in blocks if pipeline.link_bound(block))
    falling = sorted((block for block in blocks if not pipeline.link_bound(block)), reverse=True)
    return (*rising, *falling)
