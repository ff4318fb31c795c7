"""Kernel launches on the simulated V100, on this process's own memory, so the launcher runs without a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

from fastattention_vllm.attention.volta import kernels as volta
from fastattention_vllm.attention.volta import launch
from fastattention_vllm.attention.volta.launch import VOLTA
from kernels.volta.sim import Simulation
from kernels.volta.variants import VARIANTS, Variant, describe
from tests.kernels.volta.attention import cubin, execute_all

COMPILED = {describe(variant)["name"]: variant for variant in VARIANTS}


def describe_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every folder appear to have a manifest of all kernels, without compiling anything."""
    ours = [launch.Variant(**describe(one)) for one in VARIANTS]  # type: ignore[arg-type]
    table = {(one.kind, one.head_size, one.adjusted, one.cache, one.architecture): one for one in ours}
    monkeypatch.setattr(volta, "_described", lambda folder: table)


@dataclass
class SimulatedKernel:
    """Replaces ``cuda_driver.Kernel``."""

    variant: Variant
    grids: list[tuple[str, tuple[int, int, int]]]
    """All launches so far, shared by all kernels."""

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        parameters: ctypes.Structure,
        stream: int,
    ) -> None:
        self.grids.append((self.variant.kernel, grid))
        simulation = Simulation(cubin(self.variant), self.variant.kernel)
        for begin, end in sorted({mapping_of(address) for address in addresses(parameters)}):
            memory = (ctypes.c_uint8 * (end - begin)).from_address(begin)
            simulation.map(numpy.frombuffer(memory, dtype=numpy.uint8), begin)
        simulation.launch(grid, block, bytes(parameters), shared_bytes)
        execute_all(simulation, grid)


def addresses(parameters: ctypes.Structure) -> list[int]:
    """All fields of 64 unsigned bits, including those of nested structures."""
    found = []
    for name, kind in parameters._fields_:  # type: ignore[misc]
        value = getattr(parameters, name)
        if isinstance(value, ctypes.Structure):
            found += addresses(value)
        elif kind is ctypes.c_uint64 and value:
            found.append(value)
    return found


def mapping_of(address: int) -> tuple[int, int]:
    """The mapped range of this process's memory that contains the address.

    Adjacent mappings that differ only in their madvise flags, as parts of the heap may, count as one.
    """
    found: tuple[int, int] | None = None
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, permissions = line.split(maxsplit=2)[:2]
        begin, end = (int(part, 16) for part in where.split("-"))
        if not permissions.startswith("rw"):
            continue
        if found is not None and found[1] == begin:
            begin = found[0]
        elif found is not None and found[0] <= address < found[1]:
            break
        found = begin, end
    if found is None or not found[0] <= address < found[1]:
        raise AssertionError(f"{address:#x} is not writable memory of this process")
    return found


def use(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, int, int]]]:
    """Simulate all further launches; returns the list to which their grids are appended."""
    grids: list[tuple[str, tuple[int, int, int]]] = []
    describe_kernels(monkeypatch)
    monkeypatch.setattr(volta, "_kernel", lambda variant: SimulatedKernel(COMPILED[variant.name], grids))
    monkeypatch.setattr(volta, "target", lambda: volta.Target(VOLTA, "cubin"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
    return grids
