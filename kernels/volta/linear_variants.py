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
SMS = 80
"""Number of SMs of a V100."""


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

    def shared_bytes(self, warps: int) -> int:
        """Shared memory of a CTA of so many warps: sums at the end, and before with more than eight rows, x."""
        products = self.rows // 8
        staged = 16 * 32 * warps * products * (self.unit // 32) if products > 1 else 0
        return max(16 * 32 * warps * self.tiles, staged)


@dataclass(frozen=True, slots=True)
class UnpackVariant:
    """The cubin that converts a format to fp16."""

    weight: str
    warps: int = 4
    source: str = "unpack.cu"
    kernel: str = "fa_volta_unpack"
    architecture: int = 70

    @property
    def name(self) -> str:
        return f"unpack_{self.weight}"

    @property
    def defines(self) -> dict[str, str | int]:
        return {"WEIGHT": WEIGHTS.index(self.weight), "WARPS": self.warps}


def shape(columns: int, k: int, variant: LinearVariant) -> tuple[int, int]:
    """CTAs and warps of a launch. CTAs fill the GPU a whole number of times, if there are enough tiles."""
    tiles, at_once = columns // TILE, SMS * variant.ctas_per_sm
    waves = -(-tiles // (at_once * variant.tiles))
    units = -(-k // variant.unit)
    # The most warps whose turns at the units leave few of them idle.
    warps = max(range(4, variant.warps + 1), key=lambda count: (units / (count * -(-units // count)) > 0.93, count))
    return min(tiles, waves * at_once), warps


VARIANTS = tuple(
    LinearVariant(weight, rows, tiles, warps)
    for weight in WEIGHTS
    for rows, tiles, warps in ((8, 7, 8), (8, 4, 8), (16, 7, 4), (16, 4, 6))
)

UNPACK = tuple(map(UnpackVariant, WEIGHTS))
