"""The attention kernels on the problems of the CPU kernels' tests.

The shipped kernels run on the simulated V100, their sources also on the emulator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.attention.volta import kernels as volta
from fastattention_vllm.attention.volta import launch as volta_kernels
from fastattention_vllm.attention.volta.launch import CHUNK, VOLTA, AttentionParams, Divisor, Split
from kernels.volta import variants
from kernels.volta.emulator import Emulation
from kernels.volta.nvrtc import compile_cuda
from kernels.volta.sim import Cubin, Simulation
from kernels.volta.variants import Variant
from tests.attention import oracle

SOURCES = Path(__file__).parents[3] / "kernels" / "volta" / "src"
TOLERANCE = 2e-3
"""Tolerance for outputs of about one: weights are rounded to fp16, and so are outputs."""
LSE_TOLERANCE = 2e-5


class Machine(Protocol):
    """Runs a kernel: holds its memory, and executes a launch block by block."""

    def map(self, array: numpy.typing.NDArray[Any]) -> int: ...
    def launch(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], parameters: bytes, dynamic_shared_bytes: int
    ) -> None: ...
    def execute(self, x: int, y: int, z: int) -> None: ...


Machines = Callable[[Variant], Any]
"""Creates a :class:`Machine` for a variant."""


def simulated(variant: Variant) -> Simulation:
    return Simulation(cubin(variant), variant.kernel)


def emulated(variant: Variant) -> Emulation:
    return Emulation(
        SOURCES / variant.source,
        variant.kernel,
        defines=variant.defines,
        architecture=f"sm_{variant.architecture}",
    )


@functools.cache
def cubin(variant: Variant) -> Cubin:
    source = (SOURCES / variant.source).read_text()
    compiled = compile_cuda(
        source,
        name=variant.source,
        defines=variant.defines,
        include=[SOURCES],
        options=variants.COMPILER_OPTIONS,
    )
    return Cubin(compiled.binary)


def address_of(tensor: torch.Tensor, machine: Machine, mapped: dict[int, int]) -> int:
    """The address of ``tensor`` on the simulated GPU.

    Views of one storage stay views, so keys and values share pages.
    """
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in mapped:
        mapped[storage.data_ptr()] = machine.map(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
    return mapped[storage.data_ptr()] + tensor.storage_offset() * tensor.element_size()


class Outputs:
    """The outputs of a problem, filled with a number that shows where no kernel wrote."""

    def __init__(self, problem: AttentionProblem) -> None:
        tokens, heads, head_size = problem.query.shape
        self.problem = problem
        self.out = torch.full((tokens, heads, head_size), 7, dtype=torch.float16)
        self.lse = torch.full((tokens, heads), 7, dtype=torch.float32)

    def parameters(self, machine: Machine) -> AttentionParams:
        """The parameters of a launch on a GPU, with all tensors mapped into ``machine``."""
        mapped: dict[int, int] = {}
        return volta.parameters(self.problem, self.out, self.lse, lambda tensor: address_of(tensor, machine, mapped))


def variant_of(problem: AttentionProblem, architecture: int = VOLTA) -> Variant:
    adjusted = problem.softcap > 0 or problem.alibi_slopes is not None
    return variants.prefill(
        problem.query.shape[2],
        adjusted=adjusted,
        cache=volta.CACHES[problem.key.dtype],
        architecture=architecture,
    )


class Parts:
    """The parts that kernels pass to the combine kernel, with NaN where they write nothing."""

    def __init__(self, problem: AttentionProblem, count: int, least: int = 0) -> None:
        seqs, kv_heads, head_size = len(problem.seq_lens), problem.key.shape[-2], problem.query.shape[2]
        self.count, self.least = count, least
        self.rows = problem.query.shape[1] // kv_heads * int(torch.diff(problem.query_start_loc).max())
        self.out = numpy.full((seqs, kv_heads, count, self.rows, head_size), numpy.nan, numpy.float16)
        self.lse = numpy.full((seqs, kv_heads, count, self.rows), numpy.nan, numpy.float32)

    def parameters(self, outputs: Outputs, machine: Machine) -> Split:
        where = machine.map(self.out), machine.map(self.lse)
        return Split(outputs.parameters(machine), *where, Divisor.by(self.count), self.rows, self.least)


Launch = tuple[Any, tuple[int, int, int]]
"""A machine that is ready to run, and its grid."""


def launch_prefill(
    problem: AttentionProblem,
    outputs: Outputs | None = None,
    parts: Parts | None = None,
    on: Machines = simulated,
    architecture: int = VOLTA,
) -> Launch:
    variant, outputs, parts = variant_of(problem, architecture), outputs or Outputs(problem), parts or Parts(problem, 1)
    machine = on(variant)
    grid = volta_kernels.prefill_grid(variant, parts.rows, problem.key.shape[-2], len(problem.seq_lens))
    grid = (grid[0] * parts.count, grid[1], grid[2])
    argument = bytes(parts.parameters(outputs, machine))
    machine.launch(grid, (variant.threads, 1, 1), argument, variant.shared_bytes)
    return machine, grid


def prefill(
    problem: AttentionProblem, on: Machines = simulated, count: int = 1, architecture: int = VOLTA
) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` is the number of parts that the keys are split into."""
    outputs, parts = Outputs(problem), Parts(problem, count)
    execute_all(*launch_prefill(problem, outputs, parts, on, architecture))
    if count > 1:
        execute_all(*launch_combine(problem, outputs, parts, on))
    return outputs.out, outputs.lse


def decode_parts(problem: AttentionProblem) -> Parts:
    least = volta_kernels.min_parts(problem.key.shape[-2])
    return Parts(problem, volta_kernels.decode_parts(int(problem.seq_lens.max()), least), least)


def launch_decode(
    problem: AttentionProblem,
    outputs: Outputs | None = None,
    parts: Parts | None = None,
    on: Machines = simulated,
    architecture: int = VOLTA,
) -> Launch:
    outputs, parts = outputs or Outputs(problem), parts or decode_parts(problem)
    make = variants.decode if volta_kernels.kind_of(parts.rows) == "decode" else variants.decode_wide
    variant = make(problem.query.shape[2], volta.CACHES[problem.key.dtype], architecture)
    machine = on(variant)
    grid = (problem.key.shape[-2], len(problem.seq_lens), parts.count)
    argument = bytes(parts.parameters(outputs, machine))
    machine.launch(grid, (variant.threads, 1, 1), argument, variant.shared_bytes)
    return machine, grid


def launch_combine(problem: AttentionProblem, outputs: Outputs, parts: Parts, on: Machines = simulated) -> Launch:
    machine = on(variants.COMBINE)
    grid = (parts.rows, problem.key.shape[-2], len(problem.seq_lens))
    machine.launch(grid, (problem.query.shape[2] // CHUNK, 1, 1), bytes(parts.parameters(outputs, machine)), 0)
    return machine, grid


def decode(
    problem: AttentionProblem, on: Machines = simulated, architecture: int = VOLTA
) -> tuple[torch.Tensor, torch.Tensor]:
    outputs, parts = Outputs(problem), decode_parts(problem)
    execute_all(*launch_decode(problem, outputs, parts, on, architecture))
    execute_all(*launch_combine(problem, outputs, parts, on))
    return outputs.out, outputs.lse


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
    on: Machines = simulated,
) -> None:
    variant = variants.write_kv(volta.CACHES[key_cache.dtype])
    machine = on(variant)
    mapped: dict[int, int] = {}
    parameters = volta.write_parameters(
        key, value, key_cache, value_cache, slots, *scales, lambda tensor: address_of(tensor, machine, mapped)
    )
    grid = (len(slots), 1, 1)
    machine.launch(grid, (variant.threads, 1, 1), bytes(parameters), 0)
    execute_all(machine, grid)


def execute_all(machine: Machine, grid: tuple[int, int, int]) -> None:
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                machine.execute(x, y, z)


def check(problem: AttentionProblem, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    real = int(problem.query_start_loc[-1])
    out, lse = oracle.attention(problem)
    assert (found[0][real:] == 7).all(), "padding rows must not be touched"
    worst = float((found[0][:real].double() - out[:real]).abs().max())
    assert worst < TOLERANCE, f"outputs are off by {worst:.2e}"
    torch.testing.assert_close(found[1][:real].double(), lse[:real], rtol=0, atol=LSE_TOLERANCE)
