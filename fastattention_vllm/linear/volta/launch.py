"""The parameters of a launch of the kernels for quantised weights. Needs no GPU and no torch.

``kernels/volta/src/linear.h`` defines the structures that are mirrored here. Before an image is loaded, they are
compared with the manifest of the compiled images (``attention/volta/images.py``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from ctypes import c_int32, c_uint64
from dataclasses import dataclass

TILE = 8
"""Columns."""
UNIT_BYTES = 512
"""Of a tile."""
MOST_ROWS = 16
"""Of a launch."""
SMS = 80
"""Number of SMs of a V100. This number is used on every GPU, so that results do not depend on the GPU."""
MOST_TURNS = {"int4": 7, "int8": 4, "fp8_e4m3": 4}
"""Launches of ``MOST_ROWS`` rows up to which they are faster than unpacked weights
(benchmarks/notes/volta_weights.md)."""
SCRATCH_BYTES = 64 << 20
"""Maximum size of a slice of unpacked weights."""
CONSTANTS = {"tile": TILE, "unit_bytes": UNIT_BYTES, "most_rows": MOST_ROWS}
"""What packed weights and launches depend on, besides the structures."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel, as described by the manifest (``kernels/volta/linear_variants.py``)."""

    name: str
    kernel: str
    weight: str
    """``int4``, ``int8`` or ``e4m3``."""
    rows: int
    """Maximum; 0 for the kernel that unpacks weights."""
    tiles: int
    """Tiles of eight columns of a CTA, at most; 0 as above."""
    warps: int
    """Of a CTA, at most."""
    shared_bytes_per_warp: int
    ctas_per_sm: int
    architecture: int

    @property
    def shared_bytes(self) -> int:
        return self.warps * self.shared_bytes_per_warp

    def image(self, suffix: str) -> str:
        """The file name of its image. ``suffix``: ``cubin`` or ``ptx``."""
        return f"{self.name}.{suffix}"


class Weights(ctypes.Structure):
    """``fastattention::Weights``."""

    _fields_ = [
        *((name, c_uint64) for name in ("packed", "scales", "factor")),
        *((name, c_int32) for name in ("columns", "units", "chunks", "groups", "group_shift")),
        *((name, c_int32) for name in ("scale_stride", "scale_shift")),
    ]


class Linear(ctypes.Structure):
    """``fastattention::Linear``."""

    _fields_ = [
        ("weights", Weights),
        *((name, c_uint64) for name in ("x", "bias", "out")),
        *((name, c_int32) for name in ("rows", "x_stride", "tiles", "more")),
    ]


class Unpack(ctypes.Structure):
    """``fastattention::Unpack``."""

    _fields_ = [("weights", Weights), ("out", c_uint64), ("first_tile", c_int32)]


STRUCTURES: tuple[type[ctypes.Structure], ...] = (Weights, Linear, Unpack)
"""The structures of ``linear.h``."""


def variant_for(variants: Iterable[Variant], rows: int, columns: int) -> Variant:
    """The variant with the fewest rows, and the fewest tiles that do not cost a further wave of CTAs.

    ``variants``: of one format. ``rows``: 1 to ``MOST_ROWS``; 0 for the kernel that unpacks weights.
    """
    fitting = [one for one in variants if (rows == 0) == (one.rows == 0) and rows <= one.rows]
    return min(fitting, key=lambda one: (one.rows, one.tiles and _waves(columns, one), one.tiles))


def _waves(columns: int, variant: Variant) -> int:
    return -(-(columns // TILE) // (SMS * variant.ctas_per_sm * variant.tiles))


def shape(columns: int, units: int, variant: Variant) -> tuple[int, int]:
    """CTAs and warps of a launch. CTAs fill the GPU a whole number of times, if there are enough tiles.

    ``units``: of k. The warps of a CTA take turns at them.
    """
    # The most warps whose turns at the units leave few of them idle.
    warps = max(range(4, variant.warps + 1), key=lambda count: (units / (count * -(-units // count)) > 0.93, count))
    return min(columns // TILE, _waves(columns, variant) * SMS * variant.ctas_per_sm), warps


def turns(rows: int) -> Iterator[tuple[int, int]]:
    """The first row and the number of rows of each launch."""
    return ((first, min(MOST_ROWS, rows - first)) for first in range(0, rows, MOST_ROWS))


def reads_packed(kind: str, rows: int) -> bool:
    """Whether so many rows are multiplied by packed weights. ``kind``: of the weights' format."""
    return rows <= MOST_ROWS * MOST_TURNS[kind]


def slice_tiles(columns: int, k: int) -> int:
    """Tiles of a slice of unpacked weights: slices of about the same size, within ``SCRATCH_BYTES`` if possible."""
    tiles = columns // TILE
    most = max(1, SCRATCH_BYTES // (2 * TILE * k))
    return -(-tiles // -(-tiles // most))
