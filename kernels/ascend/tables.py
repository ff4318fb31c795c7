"""Rates of the 910B, read from the tables of the installed package msopmodeling, and what they leave out.

The tables are those of the 910B1. The other chips differ from it in cores and clock here.
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TABLE_CLOCK_MHZ = 1850
"""The clock for which the tables give bandwidths."""


@dataclass(frozen=True)
class Chip:
    name: str
    cores: int
    """Cube cores. Each has two vector cores."""
    mhz: int


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("910B1", 24, 1850),
        Chip("910B2", 24, 1800),
        Chip("910B3", 20, 1800),
        Chip("910B4", 20, 1650),
    )
}


@dataclass(frozen=True)
class Assumptions:
    """What no table holds, in cycles."""

    issue: int = 6
    """Of the scalar unit, to hand one instruction to its pipe."""
    scalar: int = 1
    """Of the scalar unit, for one of its own instructions."""
    scalar_load: int = 400
    """To read one number from global memory."""
    hand_over: int = 280
    """From a flag on one core to the core that waits for it. PTO's calibrated model has about this."""
    copy_latency: int = 200
    """From a copy's last byte to its flag."""
    cube_latency: int = 20
    fixpipe_start: int = 26
    row: int = 7
    """Per row, for the last step of a reduction along rows; what the compiler's library does for it."""


@dataclass(frozen=True)
class Tables:
    bandwidth: dict[tuple[str, str], float]
    """Source and destination -> bytes per cycle of one core."""
    vector: dict[tuple[str, str], tuple[float, float]]
    """Instruction and "FP16" or "FP32" -> cycles for 256 bytes, and cycles until the next instruction may start."""
    assumed: Assumptions = field(default_factory=Assumptions)

    def instruction(self, name: str, dtype: str) -> tuple[float, float]:
        """As ``vector``; fp32's row where there is none for ``dtype``.

        Raises:
            KeyError: the tables do not have the instruction.
        """
        kind = "FP16" if dtype in ("f16", "bf16", "i16", "i8") else "FP32"
        return self.vector.get((name, kind)) or self.vector[name, "FP32"]


def folder() -> Path:
    """Of the installed package.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    found = importlib.util.find_spec("tilesim")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("the model needs msopmodeling's tables; run `pip install --no-deps msopmodeling`.")
    return Path(next(iter(found.submodule_search_locations)))


def read(assumed: Assumptions | None = None) -> Tables:
    place = folder() / "core" / "config" / "arc_config" / "910B1"
    bandwidth = {
        (row["src_mem"], row["dst_mem"]): float(row["bandwidth(GB/s)"]) * 1e3 / TABLE_CLOCK_MHZ
        for row in rows(place / "bandwidth_910B1.csv")
        if row["core_num"] == "-1"
    }
    # The second table is without bank conflicts; only what the first lacks is taken from it.
    vector = {
        (row["intrinsic"], row["d_type"]): (float(row["computing_cycles"]), float(row["interval_cycles"]))
        for name in ("vec_cycle_no_bank_conflict_910B1.csv", "vec_cycle_910B1.csv")
        for row in rows(place / name)
    }
    return Tables(bandwidth, vector, assumed or Assumptions())


def rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8-sig") as file:
        yield from csv.DictReader(file)
