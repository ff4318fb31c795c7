"""Cycles of vector instructions, by hand."""

from __future__ import annotations

import pytest

from kernels.ascend import vector
from kernels.ascend.tables import Tables
from kernels.ascend.vector import Shape

TABLES = Tables({}, {("VADD", "FP32"): (2.0, 18.0), ("VADDS", "FP32"): (1.0, 18.0), ("VADD", "FP16"): (3.0, 18.0)})


@pytest.mark.parametrize(
    ("shape", "number", "spread", "expected"),
    [
        (Shape((64, 128), "f32"), False, 0, 128 * 2),
        (Shape((64, 128), "f32"), True, 0, 128),
        (Shape((64, 128), "bf16"), False, 0, 64 * 3),
        (Shape((3,), "f32"), False, 0, 2),
        (Shape((64, 128), "f32"), False, 512, 128 * 2 + 18 + 8),
    ],
)
def test_an_instruction(shape: Shape, number: bool, spread: int, expected: int) -> None:
    assert vector.cycles(TABLES, "vadd", [shape], shape, number=number, spread=spread) == (expected, 18)


def test_a_sum_along_rows_folds_them_first() -> None:
    # 64 rows of 128 numbers: each folded once to 64 numbers, and then summed in 7 cycles.
    assert vector.reduction(TABLES, Shape((64, 128), "f32"), largest=False, along_rows=True) == (
        64 * 2 + 64 * 7 + 2 * 18,
        18,
    )
    assert vector.reduction(TABLES, Shape((64, 128), "f32"), largest=False, along_rows=False) == (
        128 * 2 + 6 * 18,
        18,
    )
