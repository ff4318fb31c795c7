"""Which program computes which sequences of a step. Numbers in, a frozen dataclass out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from fastattention_vllm.attention.ascend_triton.masks import PAGE
from fastattention_vllm.attention.ascend_triton.specializations import DECODE_ROWS

CORES = 24
"""Of the largest 910B. A smaller one runs the same programs in more rounds."""
MAX_DECODE_TOKENS = 8
START_PAGES = 2.0
"""What a decode program takes besides its pages, in the time of a page. Predicted, not yet measured."""
MERGE_PAGES = 0.25
"""What merging one part takes, likewise."""
STEP_PAGES = 4
"""Programs read a multiple of this number of pages, so that only the last one of a sequence has a shorter step."""


@dataclass(frozen=True)
class Decoding:
    """Sequences with equally many query tokens."""

    sequences: tuple[int, ...]
    tokens: int
    """Query tokens of each."""
    rows: int
    """Rows of a program's tile; at least the tokens times the query heads per KV head."""
    pages: int
    """Pages that one program reads."""
    splits: int
    """Programs per sequence and KV head."""


@dataclass(frozen=True)
class Work:
    tiles: tuple[tuple[int, int], ...]
    """Sequence and first query token of each prefill tile. Tiles with the most keys come first."""
    decodings: tuple[Decoding, ...]


def divide(new: Sequence[int], kept: Sequence[int], *, heads: int, kv_heads: int, tile_rows: int, causal: bool) -> Work:
    """Divide a step.

    Args:
        new: query tokens of each sequence; ``kept``: keys of each sequence.
        tile_rows: query tokens of a prefill tile.
        causal: without it, a sequence with several query tokens is never a decoding one.
    """
    group = heads // kv_heads
    most = MAX_DECODE_TOKENS if causal else 1
    few = [0 < count <= most and count * group <= DECODE_ROWS[-1] for count in new]
    tiles = [
        (sequence, row) for sequence, count in enumerate(new) if not few[sequence] for row in range(0, count, tile_rows)
    ]
    # Programs start in this order, so the short ones at the end fill the cores that are done.
    tiles.sort(key=lambda tile: new[tile[0]] - kept[tile[0]] - tile[1])
    decodings = []
    ordered = sorted((count, sequence) for sequence, count in enumerate(new) if few[sequence])
    for count, its in itertools.groupby(ordered, lambda each: each[0]):
        sequences = tuple(sequence for _, sequence in its)
        pages = [-(-kept[sequence] // PAGE) for sequence in sequences]
        each = pages_per_program(pages, kv_heads)
        rows = next(rows for rows in DECODE_ROWS if rows >= count * group)
        decodings.append(Decoding(sequences, count, rows, each, max(1, -(-max(pages) // each))))
    return Work(tuple(tiles), tuple(decodings))


def pages_per_program(pages: Sequence[int], kv_heads: int) -> int:
    """Of sequences of ``pages``: the number with which the last program should end first.

    Long programs start seldom, short ones end together. Programs start on the first free core, so that a step takes no
    longer than its rounds of the longest program, and no longer than an even share of the work and the longest program.
    """
    longest = max(pages)

    def end(each: int) -> float:
        parts = [-(-count // each) for count in pages]
        program = min(each, longest) + START_PAGES
        rounds = -(-kv_heads * sum(parts) // CORES) * program
        share = kv_heads * (sum(pages) + START_PAGES * sum(parts)) / CORES + program
        merged = -(-kv_heads * len(pages) // (2 * CORES)) * max(parts) * MERGE_PAGES
        return min(rounds, share) + merged

    steps = {-(-longest // (parts * STEP_PAGES)) for parts in range(1, 2 * CORES + 1)}
    return min((STEP_PAGES * max(1, step) for step in steps), key=lambda each: (end(each), -each))
