"""Problems with quantised weights, their packed form, float64 results, and launches: for tests and benchmarks."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int32, c_uint64
from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing

from kernels.volta import variants
from kernels.volta.emulator import Emulation
from kernels.volta.linear_variants import TILE, UNIT_BYTES, UNPACK, VARIANTS, LinearVariant, UnpackVariant
from kernels.volta.manifest import SOURCES
from kernels.volta.nvrtc import compile_cuda
from kernels.volta.sim import Cubin, Simulation

Array = numpy.typing.NDArray[Any]
QUARTERS = 4
"""Quadpairs of a warp. Each has a quarter of a unit's k."""
ORDER = {"int4": (0, 2, 4, 6, 1, 3, 5, 7), "int8": (0, 1, 2, 3), "e4m3": (0, 2, 1, 3)}
"""Of k within a word, from its lowest bits."""


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


def value_of_e4m3(bits: Array) -> Array:
    """float64. 0x7f and 0xff (NaN) are not handled."""
    whole = bits.astype(numpy.int64)
    exponent, mantissa, sign = whole >> 3 & 15, whole & 7, numpy.where(whole & 128, -1.0, 1.0)
    value: Array = sign * numpy.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return value


@dataclass(frozen=True)
class Problem:
    weight: str
    x: Array
    """fp16 ``[rows, k]``."""
    stored: Array
    """uint8 ``[k, columns]``: numbers as they are stored, one in each byte."""
    scale: Array
    """fp16 ``[groups, columns]``; e4m3: fp32 ``[groups, blocks]`` of ``128`` columns, or of all columns."""
    zero: Array
    """uint8 ``[groups, columns]``; not for e4m3."""
    group: int
    factor: Array | None = None
    """fp32 ``[columns]``."""
    bias: Array | None = None
    """fp16 ``[columns]``."""

    @property
    def k(self) -> int:
        return len(self.stored)

    @property
    def columns(self) -> int:
        return int(self.stored.shape[1])

    def weights(self, columns: slice = slice(None)) -> Array:
        """float64 ``[k, columns]``; of integers, what fp16 holds of them, as in a model with fp16 weights."""
        number = numpy.arange(self.k) // self.group
        if self.weight == "e4m3":
            blocks = self.scale.shape[1]
            width = 128 if blocks > 1 else self.columns
            scale = numpy.repeat(self.scale, width, axis=1)[:, : self.columns]
            wide: Array = scale[number][:, columns].astype(numpy.float64)
            return value_of_e4m3(self.stored[:, columns]) * wide
        whole = self.stored[:, columns].astype(numpy.float16) - self.zero[number][:, columns].astype(numpy.float16)
        weights: Array = (whole * self.scale[number][:, columns]).astype(numpy.float64)
        return weights

    def result(self, columns: slice = slice(None)) -> Array:
        """float64 ``[rows, columns]``."""
        out: Array = self.x.astype(numpy.float64) @ self.weights(columns)
        if self.factor is not None:
            out *= self.factor[columns].astype(numpy.float64)
        return out if self.bias is None else out + self.bias[columns].astype(numpy.float64)


def problem(
    weight: str,
    rows: int,
    k: int,
    columns: int,
    *,
    group: int = 128,
    blocks: bool = False,
    factor: bool = False,
    bias: bool = False,
    seed: int = 0,
) -> Problem:
    """A random problem. ``group``: in k; 0 for one group. ``blocks``: e4m3 has scales for blocks of 128 columns."""
    rng = numpy.random.default_rng(seed)
    group = group or k
    groups = -(-k // group)
    stored = rng.integers(0, 16 if weight == "int4" else 256, (k, columns), dtype=numpy.uint8)
    zero = rng.integers(0, 16 if weight == "int4" else 256, (groups, columns), dtype=numpy.uint8)
    scale = (rng.uniform(0.5, 1.5, (groups, columns)) * 0.01).astype(numpy.float16)
    if weight == "e4m3":
        stored = numpy.where(stored & 0x7F == 0x7F, stored & 0x80, stored).astype(numpy.uint8)
        scale = rng.uniform(0.5, 1.5, (groups, -(-columns // 128) if blocks else 1)).astype(numpy.float32) * 0.01
    return Problem(
        weight,
        rng.standard_normal((rows, k)).astype(numpy.float16),
        stored,
        scale,
        zero,
        group,
        rng.uniform(0.5, 1.5, columns).astype(numpy.float32) if factor else None,
        rng.standard_normal(columns).astype(numpy.float16) if bias else None,
    )


def packed(stored: Array, weight: str) -> Array:
    """uint32 ``[columns / 8, units, 32 lanes, 4]`` of uint8 ``[k, columns]``: linear.h and weights.cuh."""
    bits = 4 if weight == "int4" else 8
    of_word, unit = 32 // bits, 512 // bits
    k, columns = stored.shape
    units = -(-k // unit)
    whole = numpy.full((units * unit, columns), 5, numpy.uint8)  # the last unit's end, which x ignores
    whole[:k] = stored
    split = whole.reshape(units, QUARTERS, 4, of_word, columns // TILE, TILE)
    words = numpy.zeros((columns // TILE, units, 32, 4), numpy.uint32)
    for quadpair in range(QUARTERS):
        for slot in range(TILE):
            lane = slot & 3 | quadpair << 2 | slot >> 2 << 4
            for place, of in enumerate(ORDER[weight]):
                part = split[:, quadpair, :, of, :, slot].astype(numpy.uint32)  # [units, 4, tiles]
                words[:, :, lane] |= part.transpose(2, 0, 1) << numpy.uint32(bits * place)
    return words


def packed_scales(given: Problem) -> Array:
    """As weights.cuh wants them."""
    if given.weight == "e4m3":
        return given.scale * numpy.float32(256)
    minus = given.zero.astype(numpy.uint32) | 0xE400
    return given.scale.view(numpy.uint16).astype(numpy.uint32) | minus << numpy.uint32(16)


def weights_on(machine: Any, given: Problem) -> Weights:
    """The packed weights in the memory of ``machine``."""
    scales, unit = packed_scales(given), 8 * UNIT_BYTES // (4 if given.weight == "int4" else 8) // TILE
    return Weights(
        packed=machine.map(packed(given.stored, given.weight)),
        scales=machine.map(scales),
        factor=0 if given.factor is None else machine.map(given.factor),
        columns=given.columns,
        units=-(-given.k // unit),
        chunks=given.k // 8,
        groups=len(scales),
        group_shift=31 if given.group >= given.k else (given.group * QUARTERS // unit).bit_length() - 1,
        scale_stride=scales.shape[1],
        scale_shift=4 if given.scale.shape[1] > 1 else 31,
    )


def variant_of(given: Problem, tiles: int) -> LinearVariant:
    return next(
        one for one in VARIANTS if one.weight == given.weight and len(given.x) <= one.rows and one.tiles == tiles
    )


@functools.cache
def cubin(variant: LinearVariant | UnpackVariant) -> Cubin:
    compiled = compile_cuda(
        (SOURCES / variant.source).read_text(),
        name=variant.source,
        defines=variant.defines,
        include=[SOURCES],
        options=variants.COMPILER_OPTIONS,
    )
    return Cubin(compiled.binary)


def simulated(variant: LinearVariant | UnpackVariant) -> Simulation:
    return Simulation(cubin(variant), variant.kernel)


def emulated(variant: LinearVariant | UnpackVariant) -> Emulation:
    return Emulation(SOURCES / variant.source, variant.kernel, defines=variant.defines)


@dataclass(frozen=True)
class Launch:
    machine: Any
    out: Array
    parameters: Linear
    ctas: int

    def columns_of(self, cta: int) -> slice:
        first = cta * self.parameters.tiles + min(cta, self.parameters.more)
        count = self.parameters.tiles + (cta < self.parameters.more)
        return slice(TILE * first, TILE * (first + count))


def launch(given: Problem, variant: LinearVariant, machine: Any, ctas: int, warps: int = 0) -> Launch:
    """``warps``: by default as many as the variant can have."""
    warps = warps or variant.warps
    out = numpy.full((len(given.x), given.columns), numpy.nan, numpy.float16)
    parameters = Linear(
        weights=weights_on(machine, given),
        x=machine.map(given.x),
        bias=0 if given.bias is None else machine.map(given.bias),
        out=machine.map(out),
        rows=len(given.x),
        x_stride=given.k,
        tiles=given.columns // TILE // ctas,
        more=given.columns // TILE % ctas,
    )
    machine.launch((ctas, 1, 1), (32 * warps, 1, 1), bytes(parameters), warps * variant.shared_bytes_per_warp)
    return Launch(machine, out, parameters, ctas)


def worst(found: Array, expected: Array) -> float:
    """The largest error, as a share of the results' root mean square. NaN if a result is missing."""
    return float(numpy.abs(found - expected).max() / numpy.sqrt((expected**2).mean()))


def unpack(given: Problem, machines: Any, first: int = 0, count: int = 0) -> Array:
    """fp16 ``[columns, k]`` of ``count`` tiles from ``first`` on; 0: all that follow."""
    variant = next(one for one in UNPACK if one.weight == given.weight)
    machine = machines(variant)
    count = count or given.columns // TILE - first
    out = numpy.full((count * TILE, given.k), numpy.nan, numpy.float16)
    weights = weights_on(machine, given)
    grid = (count, -(-weights.units // variant.warps), 1)
    parameters = Unpack(weights=weights, out=machine.map(out), first_tile=first)
    machine.launch(grid, (32 * variant.warps, 1, 1), bytes(parameters), 0)
    for x in range(grid[0]):
        for y in range(grid[1]):
            machine.execute(x, y)
    return out
