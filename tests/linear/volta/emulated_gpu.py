"""Launches on the emulator, on this process's own memory, so that the launcher runs without a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace

import numpy
import pytest
import torch

from fastattention_vllm.linear.volta import kernels, launch
from fastattention_vllm.linear.volta.launch import Linear, Unpack, Variant, Weights
from fastattention_vllm.linear.volta.packing import PackedWeights
from kernels.volta.emulator import Emulation
from kernels.volta.linear_variants import ALL, describe
from kernels.volta.manifest import SOURCES

COMPILED = {str(describe(one)["name"]): one for one in ALL}


@dataclass
class EmulatedKernel:
    """Replaces ``cuda_driver.Kernel``. The emulator refuses addresses outside of what the parameters describe."""

    variant: Variant
    launches: list[tuple[str, int]]

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        parameters: Linear | Unpack,
        stream: int,
    ) -> None:
        rows = parameters.rows if isinstance(parameters, Linear) else grid[0] * launch.TILE
        self.launches.append((self.variant.name, rows))
        compiled = COMPILED[self.variant.name]
        machine = Emulation(SOURCES / compiled.source, compiled.kernel, defines=compiled.defines)
        for address, size in memory(parameters, grid[0]):
            if address:
                machine.map(numpy.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))
        machine.launch(grid, block, bytes(parameters), shared_bytes)
        for x in range(grid[0]):
            for y in range(grid[1]):
                machine.execute(x, y)


def memory(of: Linear | Unpack, tiles: int) -> list[tuple[int, int]]:
    """Addresses and sizes in bytes."""
    w: Weights = of.weights
    k = 8 * w.chunks
    of_weights = [
        (w.packed, w.columns // launch.TILE * w.units * launch.UNIT_BYTES),
        (w.scales, 4 * w.groups * w.scale_stride),
        (w.factor, 4 * w.columns),
    ]
    if isinstance(of, Unpack):
        return [*of_weights, (of.out, 2 * tiles * launch.TILE * k)]
    x = 2 * ((of.rows - 1) * of.x_stride + k)
    return [*of_weights, (of.x, x), (of.bias, 2 * w.columns), (of.out, 2 * of.rows * w.columns)]


def use(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Emulate all further launches; returns the list to which the kernels' names and numbers of rows are appended."""
    launches: list[tuple[str, int]] = []
    known = [Variant(**describe(one)) for one in COMPILED.values()]  # type: ignore[arg-type]
    monkeypatch.setattr(kernels, "_variants", lambda weight: [one for one in known if one.weight == weight])
    monkeypatch.setattr(kernels, "_kernel", lambda variant: EmulatedKernel(variant, launches))
    monkeypatch.setattr(kernels, "product_in_fp32", lambda x, transposed: x.float() @ transposed.float().t())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
    return launches


def apply(x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What the operator does with tensors of a GPU."""
    return kernels._on_gpu(x, bias, *kernels._arguments(weights))
