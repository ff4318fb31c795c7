"""A test's GPUs for sums by push: the kernel on the emulator, in this process, with boards in shared memory."""

from __future__ import annotations

import ctypes
import mmap
from types import SimpleNamespace
from unittest import mock

import numpy
import torch

from fastattention_vllm.parallel import boards, push_sums
from fastattention_vllm.parallel.push_launch import CHUNK_BYTES, SLOT_BYTES, Push
from fastattention_vllm.parallel.shared_segment import Exchange
from kernels.volta.emulator import Emulation
from kernels.volta.manifest import SOURCES
from kernels.volta.push_variants import ALL, PushVariant

KEPT: list[mmap.mmap] = []
"""As the real function keeps them."""


class EmulatedKernel:
    """Replaces ``cuda_driver.Kernel``. The emulator refuses addresses outside of what the parameters describe."""

    def __init__(self, variant: PushVariant) -> None:
        self.variant = variant

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        parameters: Push,
        stream: int,
    ) -> None:
        machine = Emulation(SOURCES / self.variant.source, self.variant.kernel, defines=self.variant.defines)
        size = parameters.chunks * CHUNK_BYTES
        board = 2 * parameters.ranks * parameters.slots * SLOT_BYTES
        memory = [(parameters.x, size), (parameters.out, size), (parameters.calls, 4 * grid[0]), (parameters.late, 4)]
        memory += [(getattr(parameters, f"board{rank}"), board) for rank in range(parameters.ranks)]
        for address, count in memory:
            machine.map(numpy.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address)))
        machine.launch(grid, block, bytes(parameters), shared_bytes)
        for x in range(grid[0]):
            machine.execute(x)


class EmulatedSums(push_sums.PushSums):
    device = "cpu"


def open_sums(rank: int, ranks: int, exchange: Exchange, max_bytes: int) -> EmulatedSums:
    """Boards in "host memory". Later sums need :func:`on_cpu`."""
    with on_cpu():
        return EmulatedSums(rank, ranks, exchange, False, max_bytes)


def on_cpu() -> mock._patch[SimpleNamespace]:
    """While this is entered, sums need no GPU."""
    cuda = SimpleNamespace(synchronize=lambda: None, current_stream=lambda: SimpleNamespace(cuda_stream=0))
    dtypes = {name: dtype for dtype, name in push_sums.NAMES.items()}
    kernels = {dtypes[variant.number]: (EmulatedKernel(variant), variant.threads) for variant in ALL}

    def addresses(segments: list[mmap.mmap], rank: int, size: int, exchange: Exchange) -> list[int]:
        KEPT.extend(segments)
        return [ctypes.addressof(ctypes.c_char.from_buffer(segment)) for segment in segments]

    return mock.patch.multiple(
        push_sums,
        load_all=lambda: kernels,
        boards=SimpleNamespace(**vars(boards) | {"on_gpus": addresses}),
        torch=SimpleNamespace(**vars(torch) | {"cuda": cuda}),
    )
