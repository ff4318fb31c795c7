"""Launches of the gated delta rule's kernels on numpy arrays, for tests and benchmarks."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_int32, c_uint64
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy
import numpy.typing

from kernels.volta import variants
from kernels.volta.emulator import Emulation
from kernels.volta.gated_delta_variants import CHUNK, CHUNKS, FACTORS, MATRICES, SIZE, GatedDeltaVariant
from kernels.volta.manifest import SOURCES
from kernels.volta.nvrtc import compile_cuda
from kernels.volta.sim import Cubin, Simulation

Array = numpy.typing.NDArray[Any]


class GatedDelta(ctypes.Structure):
    """``fastattention::GatedDelta``."""

    _fields_ = [
        *((name, c_uint64) for name in ("q", "k", "v", "g", "beta", "before", "after", "out")),
        *((name, c_uint64) for name in ("matrices", "factors", "chunks", "pieces")),
        *((name, c_int32) for name in ("key_heads", "value_heads")),
        *((name, c_int32) for name in ("q_stride", "k_stride", "v_stride", "out_stride", "normalise")),
    ]


@dataclass(frozen=True)
class Problem:
    """Of ``fp16`` unless said otherwise."""

    q: Array
    """``[tokens, key_heads, 128]``."""
    k: Array
    v: Array
    """``[tokens, value_heads, 128]``."""
    g: Array
    """fp32 ``[tokens, value_heads]``."""
    beta: Array
    """fp32 ``[tokens, value_heads]``."""
    states: Array
    """fp32 ``[requests, value_heads, 128, 128]``."""
    starts: Sequence[int]
    """The first token of each request, and the end of the last."""
    normalise: bool = True


@functools.cache
def cubin(variant: GatedDeltaVariant) -> Cubin:
    compiled = compile_cuda(
        (SOURCES / variant.source).read_text(),
        name=variant.source,
        defines=variant.defines,
        include=[SOURCES],
        options=variants.COMPILER_OPTIONS,
    )
    return Cubin(compiled.binary)


def simulated(variant: GatedDeltaVariant) -> Simulation:
    return Simulation(cubin(variant), variant.kernel)


def emulated(variant: GatedDeltaVariant) -> Emulation:
    return Emulation(SOURCES / variant.source, variant.kernel, defines=variant.defines)


class Launch:
    """The two launches of a problem, in the memory of one machine for each."""

    def __init__(self, given: Problem, scan: GatedDeltaVariant, machines: Any) -> None:
        self.given, self.scan = given, scan
        key_heads, value_heads = given.k.shape[1], given.v.shape[1]
        pieces, chunks = [], list[tuple[int, int]]()
        for request, (first, end) in enumerate(pairwise(given.starts)):
            pieces.append((first, end, len(chunks), request))
            chunks += [(at, min(at + CHUNK, end)) for at in range(first, end, CHUNK)]
        self.pieces, self.chunks = numpy.array(pieces, numpy.int32), numpy.array(chunks, numpy.int32).reshape(-1, 2)
        self.matrices = numpy.full((len(chunks), value_heads, MATRICES, CHUNK, CHUNK), numpy.nan, numpy.float16)
        self.factors = numpy.full((len(chunks), value_heads, FACTORS), numpy.nan, numpy.float32)
        self.after = numpy.full_like(given.states, numpy.nan)
        self.out = numpy.full_like(given.v, numpy.nan)
        tensors = {name: getattr(given, name) for name in ("q", "k", "v", "g", "beta")}
        tensors |= {name: getattr(self, name) for name in ("matrices", "factors", "chunks", "pieces", "after", "out")}
        self.machines = {}
        for variant, grid in (
            (CHUNKS, (value_heads, len(chunks), 1)),
            (scan, (value_heads * (SIZE // scan.values), len(pieces), 1)),
        ):
            machine = machines(variant)
            parameters = GatedDelta(
                **{name: machine.map(tensor) for name, tensor in tensors.items()},
                before=machine.map(given.states),
                key_heads=key_heads,
                value_heads=value_heads,
                q_stride=key_heads * SIZE,
                k_stride=key_heads * SIZE,
                v_stride=value_heads * SIZE,
                out_stride=value_heads * SIZE,
                normalise=given.normalise,
            )
            machine.launch(grid, (variant.threads, 1, 1), bytes(parameters), variant.shared_bytes)
            self.machines[variant.kind] = machine, grid

    def run(self) -> tuple[Array, Array]:
        """All CTAs of both kernels. Returns the output and the states."""
        for machine, grid in self.machines.values():
            for y in range(grid[1]):
                for x in range(grid[0]):
                    machine.execute(x, y)
        return self.out, self.after
