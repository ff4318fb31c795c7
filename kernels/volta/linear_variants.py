"""The list of kernels that multiply by quantised weights, like ``variants.py`` for attention. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHTS = ("int4", "int8", "e4m3")
"""The formats of weights. An index is the format's number in ``weights.cuh``."""
UNIT_BYTES = 512
TILE = 8
"""Columns."""
ROWS = (8, 16)
"""Maximum numbers of rows of a launch."""
CONSTANTS = {"tile": TILE, "unit_bytes": UNIT_BYTES, "most_rows": max(ROWS)}
"""What packed weights and the launcher depend on, besides the structures of ``linear.h``."""


@dataclass(frozen=True, slots=True)
class LinearVariant:
    """One cubin."""

    weight: str
    """One of ``WEIGHTS``."""
    rows: int
    """One of ``ROWS``."""
    tiles: int
    """Tiles of eight columns of a CTA, at most."""
    warps: int
    """Of a CTA, at most; a launch chooses."""
    source: str = "linear.cu"
    kernel: str = "fa_volta_linear"
    ctas_per_sm: int = 2
    architecture: int = 70

    @property
    def name(self) -> str:
        return f"linear_{self.weight}_rows{self.rows}_tiles{self.tiles}"

    @property
    def defines(self) -> dict[str, str | int]:
        return {
            "WEIGHT": WEIGHTS.index(self.weight),
            "ROWS": self.rows,
            "TILES": self.tiles,
            "WARPS": self.warps,
            "BLOCKS_PER_SM": self.ctas_per_sm,
        }

    @property
    def unit(self) -> int:
        """k of a unit."""
        return 128 if self.weight == "int4" else 64

    @property
    def shared_bytes_per_warp(self) -> int:
        """Shared memory of a CTA, for each of its warps: sums at the end, and before with more than eight rows, x."""
        products = self.rows // 8
        staged = 16 * 32 * products * (self.unit // 32) if products > 1 else 0
        return max(16 * 32 * self.tiles, staged)

    @property
    def shared_bytes(self) -> int:
        """Of a CTA with all warps."""
        return self.warps * self.shared_bytes_per_warp

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def image(self, suffix: str) -> str:
        """The file name of its image. ``suffix``: ``cubin`` or ``ptx``."""
        return f"{self.name}.sm_{self.architecture}.{suffix}"


@dataclass(frozen=True, slots=True)
class UnpackVariant:
    """The cubin that converts a format to fp16."""

    weight: str
    warps: int = 4
    source: str = "unpack.cu"
    kernel: str = "fa_volta_unpack"
    ctas_per_sm: int = 8
    architecture: int = 70
    rows: int = 0
    tiles: int = 0
    shared_bytes_per_warp: int = 0
    shared_bytes: int = 0

    @property
    def name(self) -> str:
        return f"unpack_{self.weight}"

    @property
    def defines(self) -> dict[str, str | int]:
        return {"WEIGHT": WEIGHTS.index(self.weight), "WARPS": self.warps}

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def image(self, suffix: str) -> str:
        """The file name of its image. ``suffix``: ``cubin`` or ``ptx``."""
        return f"{self.name}.sm_{self.architecture}.{suffix}"


VARIANTS = tuple(
    LinearVariant(weight, rows, tiles, warps)
    for weight in WEIGHTS
    for rows, tiles, warps in ((8, 7, 8), (8, 4, 8), (16, 7, 4), (16, 4, 6))
)

UNPACK = tuple(map(UnpackVariant, WEIGHTS))

ALL: tuple[LinearVariant | UnpackVariant, ...] = (*VARIANTS, *UNPACK)


def describe(variant: LinearVariant | UnpackVariant) -> dict[str, str | int]:
    """The manifest's entry for a variant, which the launcher reads."""
    names = ("kernel", "weight", "rows", "tiles", "warps", "shared_bytes_per_warp", "ctas_per_sm", "architecture")
    return {"name": f"{variant.name}.sm_{variant.architecture}"} | {name: getattr(variant, name) for name in names}
