"""What the plugin calls its Triton programs with, as the model of the 910B needs it: numbers, and arrays of numbers.

Used by: scripts/ascend_predict.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fastattention_vllm.attention.ascend_triton.masks import PAGE, UNLIMITED
from fastattention_vllm.attention.ascend_triton.specializations import COMBINE_ROWS
from kernels.ascend.simulation import Launch

HIDDEN_ARGUMENTS = 3
"""Before a program's own: the address of flags, a lock, and the workspace. After them comes the grid."""


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    size: int

    @property
    def group(self) -> int:
        return self.query // self.kv


@dataclass(frozen=True)
class Call:
    numbers: Mapping[str, int]
    arrays: Mapping[str, Callable[[int], int]]
    grid: tuple[int, int, int]
    program: tuple[int, int, int]
    """Place in the grid."""
    cached: bool
    """Whether the L2 cache already holds the keys and values."""

    def launch(self, names: Sequence[str]) -> Launch:
        """``names``: the program's arguments in order, without its constants."""
        place = {name: f"%arg{HIDDEN_ARGUMENTS + number}" for number, name in enumerate(names)}
        grid = {f"%arg{HIDDEN_ARGUMENTS + len(names) + axis}": size for axis, size in enumerate(self.grid)}
        (x, y, z), (_, rows, columns) = self.program, self.grid
        return Launch(
            {place[name]: value for name, value in self.numbers.items() if name in place} | grid,
            {place[name]: value for name, value in self.arrays.items() if name in place},
            (x * rows + y) * columns + z,
            self.cached,
        )


def _cache(heads: Heads, window: int) -> dict[str, int]:
    return {
        "page_stride": PAGE * heads.kv * heads.size,
        "token_stride": heads.kv * heads.size,
        "kv_head_stride": heads.size,
        "table_stride": 1 << 12,
        "window": window,
        "zero": PAGE,
        "cap": PAGE,
        "left_zero": 4 * PAGE,
        "mask_stride": 8 * PAGE,
    }


def prefill(heads: Heads, tokens: int, tile: int, rows: int, *, causal: bool, window: int = UNLIMITED) -> Call:
    """The program of the ``tile``-th tile of ``rows`` tokens, of one sequence without a context."""
    width = heads.query * heads.size
    numbers = {
        "query_token": width,
        "query_head": heads.size,
        "out_token": width,
        "out_head": heads.size,
        "lse_head": tokens,
        "group": heads.group,
        "causal": int(causal),
    }
    arrays = {
        "table": lambda page: page,
        "lengths": lambda _: tokens,
        "starts": lambda sequence: tokens * sequence,
        "tiles": lambda place: place // 2 * rows if place % 2 else 0,
    }
    grid = (-(-tokens // rows), heads.query, 1)
    return Call(_cache(heads, window) | numbers, arrays, grid, (tile, 0, 0), True)


def decode(
    heads: Heads, kept: int, pages: int, rows: int, *, tokens: int = 1, split: int = 0, window: int = UNLIMITED
) -> Call:
    """The program of the ``split``-th part of a sequence of ``kept`` keys. It reads from global memory."""
    used = tokens * heads.group
    splits = -(-kept // (PAGE * pages))
    numbers = {
        "query_sequence": heads.kv * used * heads.size,
        "query_head": used * heads.size,
        "query_row": heads.size,
        "tokens": tokens,
        "pages": pages,
        "splits": splits,
        "used": used,
    }
    arrays = {"table": lambda page: page, "lengths": lambda _: kept}
    return Call(_cache(heads, window) | numbers, arrays, (1, heads.kv, splits), (0, 0, split), False)


def combine(heads: Heads, kept: int, pages: int, rows: int, *, tokens: int = 1) -> Call:
    """The first program that merges the parts of :func:`decode`."""
    used = tokens * heads.group
    numbers = {
        "out_sequence": heads.kv * used * heads.size,
        "out_head": used * heads.size,
        "out_row": heads.size,
        "lse_sequence": heads.kv * used,
        "lse_head": used,
        "pages": pages,
        "splits": -(-kept // (PAGE * pages)),
        "part_rows": rows,
        "used": used,
    }
    return Call(numbers, {"lengths": lambda _: kept}, (1, heads.kv, rows // COMBINE_ROWS), (0, 0, 0), True)
