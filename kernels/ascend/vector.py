"""Cycles of vector instructions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernels.ascend.tables import Tables
from kernels.ascend.text import BYTES

REPEAT = 256
"""Bytes that one repeat of an instruction processes."""
INSTRUCTIONS = {
    "vadd": "VADD",
    "vsub": "VSUB",
    "vmul": "VMUL",
    "vmax": "VMAX",
    "vmin": "VMIN",
    "vexp": "VEXP",
    "vdiv": "VDIV",
    "vln": "LOG",
    "vsqrt": "VSQRT",
    "vabs": "VABS",
    "vcmp": "VCMPV_GE",
    "vsel": "VSEL",
    "vcast": "VABS",
    "vbrc": "VCOPY",
    "vnot": "VABS",
    "vand": "VADD",
    "vor": "VADD",
    "varange": "VADDS",
    "copy": "VCOPY",
}
"""The compiler's instruction -> the one in the tables; a similar one where they lack it."""
WITH_A_NUMBER = {"vadd": "VADDS", "vsub": "VSUBS", "vmul": "VMULS", "vmax": "VMINS", "vmin": "VMINS"}
"""The same with a number as the second operand."""
BROADCAST = 18
"""Cycles to start the spreading of one column over a row."""


@dataclass(frozen=True)
class Shape:
    dims: tuple[int, ...]
    dtype: str

    @property
    def numbers(self) -> int:
        return math.prod(self.dims)


def cycles(
    tables: Tables, name: str, inputs: list[Shape], output: Shape, *, number: bool, spread: int
) -> tuple[float, float]:
    """Cycles of an instruction other than a reduction, and until the next may start.

    Args:
        number: one operand is a number; ``spread``: numbers of the buffer for broadcasting, or 0.

    Raises:
        ValueError: the instruction is not known.
    """
    if name not in INSTRUCTIONS:
        raise ValueError(f"the model does not know the instruction {name}.")
    known = WITH_A_NUMBER.get(name, INSTRUCTIONS[name]) if number else INSTRUCTIONS[name]
    if name == "vbrc" and number:
        known = "VECTOR_DUP"
    widest = output
    if name in ("vcmp", "vcast"):
        widest = max([output, *inputs], key=lambda each: BYTES[each.dtype])
    each_repeat, gap = tables.instruction(known, widest.dtype)
    if name == "vcast" and any(each.dtype == "i1" for each in inputs):
        each_repeat = 2.0
    size = max(BYTES[widest.dtype], 2.0 if name == "vcast" else 0.0)
    found = max(1, math.ceil(output.numbers * size / REPEAT)) * each_repeat
    if spread:
        found += BROADCAST + math.ceil(spread / 64)
    return found, gap


def reduction(tables: Tables, given: Shape, *, largest: bool, along_rows: bool) -> tuple[float, float]:
    """As :func:`cycles`, for a maximum or a sum along rows or columns."""
    columns = given.dims[-1]
    rows = max(1, given.numbers // max(columns, 1))
    each_repeat, gap = tables.instruction("VMAX" if largest else "VADD", given.dtype)
    lane = int(REPEAT // BYTES[given.dtype])
    if not along_rows:
        return math.ceil(given.numbers / lane) * each_repeat + math.ceil(math.log2(max(rows, 2))) * gap, gap
    # Rows are folded to one repeat, each of which is then reduced to a number.
    folds = max(0, math.ceil(columns / lane) - 1)
    steps = math.ceil(math.log2(max(folds, 1) + 1)) + 1
    return rows * folds * each_repeat + rows * tables.assumed.row + steps * gap, gap
