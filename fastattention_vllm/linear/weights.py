"""How a checkpoint's matrix is quantised, as tensors whose k comes first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["int4", "int8", "fp8_e4m3"]
Scales = Literal["group", "channel", "tensor", "block"]
BLOCK = 128
"""Rows and columns of a block of FP8 weights that has a scale."""
PER_WORD = {"int4": 8, "int8": 4}
"""Numbers in 32 bits."""
MIDDLE = {"int4": 8, "int8": 128}
"""The zero point of weights without zero points."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """weight[k][n] = scale * (number - zero point), or scale * number for FP8.

    Raises:
        ValueError: the combination does not exist. One sentence.
    """

    kind: Kind
    """Unsigned integers of 4 or 8 bits, or FP8 e4m3 (fn: without infinities)."""
    scales: Scales
    """``group``: of ``group_size`` k of a column. ``channel``: of a column. FP8 has no ``group``, but ``tensor``: a
    single scale, and ``block``: of 128 x 128 weights."""
    group_size: int = 0
    """0 unless ``scales`` is ``group``."""
    zero_points: bool = False
    """Whether each group or column has a zero point of its own; integers only. Otherwise all of them are
    ``MIDDLE[kind]``."""

    def __post_init__(self) -> None:
        allowed = ("channel", "tensor", "block") if self.kind == "fp8_e4m3" else ("group", "channel")
        if self.scales not in allowed:
            raise ValueError(f"scales are per {self.scales}, but {self.kind} weights have them per {_list(allowed)}.")
        if (self.scales == "group") != (self.group_size > 0):
            raise ValueError(
                f"group_size is {self.group_size}, but it must be positive for scales per group and 0 otherwise."
            )
        if self.zero_points and self.kind == "fp8_e4m3":
            raise ValueError("fp8_e4m3 weights have no zero points; set zero_points to False.")

    def __str__(self) -> str:
        size = f" of {self.group_size}" if self.scales == "group" else f" of {BLOCK} x {BLOCK}" * self._blocks
        return f"{self.kind} with a scale per {self.scales}{size}{' and zero points' * self.zero_points}"

    @property
    def _blocks(self) -> bool:
        return self.scales == "block"

    def scale_shape(self, k: int, n: int) -> tuple[int, int]:
        """Shape of the scales of a matrix ``[k, n]``, and of its zero points. The last group or block may be short."""
        rows = -(-k // self.group_size) if self.scales == "group" else -(-k // BLOCK) if self._blocks else 1
        columns = -(-n // BLOCK) if self._blocks else 1 if self.scales == "tensor" else n
        return rows, columns

    def number_shape(self, k: int, n: int) -> tuple[int, int]:
        """Shape of the tensor of numbers of a matrix ``[k, n]``."""
        return (k // PER_WORD[self.kind] if self.kind in PER_WORD else k), n


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix ``[k, n]`` as checkpoints store it, on any device, with any strides (so ``tensor.t()`` is fine).

    Raises:
        ValueError: a tensor is missing, or has another shape or dtype than the format wants. One sentence.
    """

    format: WeightFormat
    k: int
    """Input size."""
    n: int
    """Output size."""
    numbers: torch.Tensor
    """Integers: int32 ``[k / 8, n]`` (``int4``) or ``[k / 4, n]`` (``int8``). A word has consecutive k of a column, the
    first in its lowest bits, as in GPTQ and compressed-tensors (with k first). FP8: float8_e4m3fn ``[k, n]``."""
    scales: torch.Tensor
    """``format.scale_shape(k, n)``; fp16, bf16 or fp32. The kernels round those of integers to fp16."""
    zeros: torch.Tensor | None = None
    """Zero points, one in each element: any integer dtype, ``format.scale_shape(k, n)``, from 0 to 15 or 255. Exactly
    if ``format.zero_points``."""

    def __post_init__(self) -> None:
        form = self.format
        per_word = PER_WORD.get(form.kind, 1)
        if self.k % per_word:
            raise ValueError(f"k is {self.k}, but {form.kind} weights need a multiple of {per_word}.")
        _check("numbers", self.numbers, form.number_shape(self.k, self.n), (_DTYPES.get(form.kind, torch.int32),))
        _check("scales", self.scales, form.scale_shape(self.k, self.n), (torch.float16, torch.bfloat16, torch.float32))
        if (self.zeros is not None) != form.zero_points:
            raise ValueError(
                f"zero points are {'given' if self.zeros is not None else 'missing'}, but the format is {form}."
            )
        if self.zeros is not None:
            _check("zeros", self.zeros, form.scale_shape(self.k, self.n), _INTEGERS)


_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn}
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, but must have {list(shape)}.")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {tensor.dtype}, but must have {_list(dtypes)}.")


def _list(names: Iterable[object]) -> str:
    *most, last = map(str, names)
    return f"{', '.join(most)} or {last}" if most else last
