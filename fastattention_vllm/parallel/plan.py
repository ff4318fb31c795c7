"""Plans the number and sizes of the blocks of rows into which a row-parallel linear layer is split.

While one block is summed over the ranks, the next blocks are multiplied. Only the first block's matmul and the last
block's all-reduce are not overlapped. Which of the two should be small depends on the longer stage:

- If the link is the bottleneck: a small first block, so that the link starts early. The paper (arXiv 2410.16663,
  section 4.2) gives "the first block a smaller task"; CANN's matmul-all-reduce calls this "short at front".
- If the matmul is the bottleneck: a small last block, so that little is left to sum at the end; CANN's "short at end".

Both are cases of Johnson's rule for two machines in a row (S. M. Johnson, Naval Research Logistics Quarterly 1, 1954):
blocks that take less time on the first machine than on the second go first, in ascending order; the others follow in
descending order. In between, a block should be multiplied in the time in which the previous block is summed. With a
time per row of g for the matmul and a for the all-reduce, each block is a/g times as large as the previous one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastattention_vllm.parallel.pipeline import Pipeline

GRANULE = 128
"""Rows of a matmul kernel's tile on most devices. A block that is not a multiple wastes part of a tile."""
COUNTS = (*range(2, 11), 12, 16)
"""Numbers of blocks. More than 16 blocks gain little, and each costs a launch and a message."""
RATIOS = ((1, 1), (5, 4), (3, 2), (2, 1), (3, 1), (4, 1), (6, 1))
"""Ratios between a block and its smaller neighbour, as fractions."""
SHORT_ENDS = (2, 4)
"""Factors by which the one small block is smaller than the other, equal blocks."""
MIN_GAIN = 0.03
"""The fraction of the time of one block that several blocks must save. Models are not exact, and no plan may lose."""
MIN_CHANGE = 0.002
"""The fraction of a plan's time that another plan must save to replace it. The search tries few blocks first."""


@dataclass(frozen=True)
class Plan:
    """Blocks of rows, in order, and the model's predictions for them."""

    blocks: tuple[int, ...]
    """Rows per block; empty for no rows. All but the last are multiples of the granule."""
    seconds: float
    """Predicted."""
    one_block_seconds: float
    hideable_seconds: float

    @property
    def hidden(self) -> float:
        """The fraction of the hideable time that is hidden, 0 to 1."""
        return (self.one_block_seconds - self.seconds) / self.hideable_seconds if self.hideable_seconds else 0.0


@functools.lru_cache(maxsize=8192)
def plan(rows: int, pipeline: Pipeline, granule: int = GRANULE) -> Plan:
    """The blocks with the shortest predicted time. One block unless several blocks save ``MIN_GAIN``.

    Ranks with the same numbers get the same result: splits use integers, and times are compared with additions and
    multiplications that round the same way everywhere. Ranks must agree on the numbers first.
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
    """``count`` blocks, as equal as the granule allows; fewer if there are fewer granules."""
    return cut(rows, [1] * count, granule)


def cut(rows: int, weights: Sequence[int], granule: int) -> tuple[int, ...]:
    """Blocks in proportion to ``weights``, rounded to granules, without empty blocks."""
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
    """The best split of a multiple of the granule, so that a server's batch lengths need few searches (2 ms each)."""
    best: tuple[int, ...] = (rows,)
    seconds = float("inf")
    for weights in _shapes(rows // granule):
        ordered = _in_johnsons_order(cut(rows, weights, granule), pipeline)
        # The rule ignores that stages slow each other down, which may reverse the best order.
        for blocks in (ordered, ordered[::-1]) if pipeline.slows_down else (ordered,):
            predicted = pipeline.seconds(blocks)
            if predicted < (1 - MIN_CHANGE) * seconds:
                best, seconds = blocks, predicted
    return best


def _shapes(maximum: int) -> Iterator[list[int]]:
    """Relative block sizes: equal, growing, and one small block among equal ones."""
    for count in COUNTS:
        if count > maximum:
            return
        yield from ([up**i * down ** (count - 1 - i) for i in range(count)] for up, down in RATIOS)
        yield from ([1, *[times] * (count - 1)] for times in SHORT_ENDS)


def _in_johnsons_order(blocks: Sequence[int], pipeline: Pipeline) -> tuple[int, ...]:
    rising = sorted(block for block in blocks if pipeline.link_bound(block))
    falling = sorted((block for block in blocks if not pipeline.link_bound(block)), reverse=True)
    return (*rising, *falling)
