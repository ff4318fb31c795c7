"""Formats that do not exist, and tensors that do not fit one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fastattention_vllm.linear.weights import WeightFormat
from tests.linear import oracle

INT4 = WeightFormat("int4", "group", 128, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("int4", "block"), r"^scales are per block, but int4 weights have them per group or channel\.$"),
        (("fp8_e4m3", "group", 128), r"^scales are per group, but fp8_e4m3 .* per channel, tensor or block\.$"),
        (("int8", "group"), r"^group_size is 0, but it must be positive for scales per group and 0 otherwise\.$"),
        (("int8", "channel", 64), r"^group_size is 64, but"),
        (("fp8_e4m3", "tensor", 0, True), r"^fp8_e4m3 weights have no zero points; set zero_points to False\.$"),
    ],
)
def test_formats_that_do_not_exist(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WeightFormat(*arguments)


@pytest.mark.parametrize(
    ("form", "k", "n", "scales", "numbers"),
    [
        (INT4, 200, 136, (2, 136), (25, 136)),
        (WeightFormat("int8", "channel"), 200, 136, (1, 136), (50, 136)),
        (WeightFormat("fp8_e4m3", "block"), 200, 136, (2, 2), (200, 136)),
        (WeightFormat("fp8_e4m3", "tensor"), 200, 136, (1, 1), (200, 136)),
    ],
)
def test_shapes(form: WeightFormat, k: int, n: int, scales: tuple[int, int], numbers: tuple[int, int]) -> None:
    assert form.scale_shape(k, n) == scales
    assert form.number_shape(k, n) == numbers


def test_the_names_of_formats() -> None:
    assert str(INT4) == "int4 with a scale per group of 128 and zero points"
    assert str(WeightFormat("fp8_e4m3", "block")) == "fp8_e4m3 with a scale per block of 128 x 128"
    assert str(WeightFormat("int8", "channel")) == "int8 with a scale per channel"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"k": 252}, r"^k is 252, but int4 weights need a multiple of 8\.$"),
        ({"k": 264}, r"^numbers has shape \[32, 64\], but must have \[33, 64\]\.$"),
        ({"numbers": torch.zeros(32, 64)}, r"^numbers has dtype torch\.float32, but must have torch\.int32\.$"),
        ({"scales": torch.zeros(1, 64)}, r"^scales has shape \[1, 64\], but must have \[2, 64\]\.$"),
        ({"scales": torch.zeros(2, 64).double()}, r"^scales has dtype torch\.float64, but must have torch\.float16, "),
        ({"zeros": None}, r"^zero points are missing, but the format is int4 with a scale per group of 128 and zero"),
        ({"zeros": torch.zeros(2, 8)}, r"^zeros has shape \[2, 8\], but must have \[2, 64\]\.$"),
        (
            {"format": WeightFormat("int4", "group", 128)},
            r"^zero points are given, but the format is int4 with a scale",
        ),
    ],
)
def test_tensors_that_do_not_fit(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(oracle.matrix(INT4, 256, 64), **changes)
