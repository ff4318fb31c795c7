"""The model beside what was measured on NPUs: the few rows that msopmodeling ships for its own tests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kernels.ascend import vector
from kernels.ascend.tables import CHIPS, Tables, folder, rows

FP32_PRODUCTS = 2048
"""Of a cube core in one cycle."""


@dataclass(frozen=True)
class Comparison:
    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Above 0, the model is too slow."""
        return self.predicted / self.measured - 1


def vector_additions(tables: Tables) -> Iterator[Comparison]:
    """Cycles of tiles of 2048 and more fp32 numbers: the only vector instruction with measured cycles."""
    place = folder() / "tests" / "st" / "tile_op_accuracy"
    measured: dict[str, list[float]] = {}
    for row in rows(place / "tile_op_profiling.csv"):
        if row["profiling"].replace(".", "").isdigit():
            measured.setdefault(row["test_case"], []).append(float(row["profiling"]))
    for row in rows(place / "tile_op_test_case.csv"):
        cycles = measured.get(row["test_case"], [])
        if row["opcode"] != "add" or row["i_operand_0_data_type_str"] != "FP32" or len(set(cycles)) != 1:
            continue
        whole = math.prod(int(one) for one in row["i_operand_0_shape"].strip("[]").split(","))
        numbers = 2 * whole // len(cycles)  # a tensor is measured tile by tile, each tile twice
        if whole >= 16384 and numbers >= 2048:
            tile = vector.Shape((numbers,), "f32")
            took, gap = vector.cycles(tables, "vadd", [tile, tile], tile, number=False, spread=0)
            yield Comparison(f"vector addition of {numbers} numbers, cycles", took + gap, cycles[0])


def matrix_products(tables: Tables) -> Iterator[Comparison]:
    """Microseconds that cube and fixpipe are busy in CANN's MatMulV3, fp32, on a 910B1."""
    place = folder() / "tests" / "st" / "ops_accuracy" / "eng_ops_classic" / "matmul" / "op_summary_910B1.csv"
    mhz = CHIPS["910B1"].mhz
    for row in rows(place):
        (m, k), (_, n) = ([int(one) for one in shape.split(",")] for shape in row["Input Shapes"].strip('"').split(";"))
        cores = int(row["Block Dim"])
        name = f"of a product of {m} x {k} and {k} x {n} numbers, microseconds"
        cube = m * n * k / FP32_PRODUCTS / cores / mhz
        fixpipe = m * n * 4 / cores / tables.bandwidth["L0C", "L2"] / mhz
        yield Comparison(f"cube {name}", cube, float(row["aic_mac_time(us)"]))
        yield Comparison(f"fixpipe {name}", fixpipe, float(row["aic_fixpipe_time(us)"]))
