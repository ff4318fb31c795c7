"""The attention kernels as they are shipped, on the simulated V100, for problems of the CPU kernels' tests."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import numpy
import torch

from fastattention_vllm.attention import volta_kernels
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.attention.volta_kernels import DECODE_ROWS, Decode, Divisor, Prefill, Variant, WriteKv
from kernels.volta.nvrtc import compile_cuda
from kernels.volta.sim import Cubin, Simulation
from tests.attention import oracle

SOURCES = Path(__file__).parents[2] / "kernels" / "volta" / "src"
TOLERANCE = 2e-3
"""Of outputs around one: weights are rounded to fp16, and so are outputs."""
LSE_TOLERANCE = 2e-5


@functools.cache
def cubin(variant: Variant) -> Cubin:
    source = (SOURCES / variant.source).read_text()
    compiled = compile_cuda(
        source,
        name=variant.source,
        defines=variant.defines,
        include=[SOURCES],
        options=volta_kernels.COMPILER_OPTIONS,
    )
    return Cubin(compiled.binary)


def parameters(problem: AttentionProblem, at: dict[str, int]) -> Prefill:
    """``at``: addresses of the tensors."""
    paged = problem.block_table is not None
    key, query = problem.key, problem.query
    heads, kv_heads = query.shape[1], key.shape[-2]
    block_stride = key.stride(0) if paged else 0
    token_stride, head_stride = key.stride()[-3], key.stride()[-2]
    return Prefill(
        **at,
        query_token_stride=query.stride(0),
        query_head_stride=query.stride(1),
        kv_block_stride=block_stride,
        kv_token_stride=token_stride,
        kv_head_stride=head_stride,
        out_token_stride=heads * query.shape[2],
        out_head_stride=query.shape[2],
        lse_token_stride=heads,
        lse_head_stride=1,
        page=Divisor.by(key.shape[1] if paged else 1),
        group=Divisor.by(heads // kv_heads),
        block_table_stride=problem.block_table.stride(0) if problem.block_table is not None else 0,
        window_left=problem.window[0],
        window_right=0 if problem.causal else problem.window[1],
        scale=problem.scale * math.log2(math.e),
        softcap=problem.softcap * math.log2(math.e),
    )


def address_of(tensor: torch.Tensor, simulation: Simulation, mapped: dict[int, int]) -> int:
    """Where the simulated GPU sees ``tensor``. Views of one storage stay views: keys and values share their pages."""
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in mapped:
        mapped[storage.data_ptr()] = simulation.map(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
    return mapped[storage.data_ptr()] + tensor.storage_offset() * tensor.element_size()


class Memory:
    """Arrays of a problem, mapped into simulations."""

    def __init__(self, problem: AttentionProblem) -> None:
        self.problem = problem
        tokens, heads, head_size = problem.query.shape
        self.out = numpy.full((tokens, heads, head_size), 7, numpy.float16)
        self.lse = numpy.full((tokens, heads), 7, numpy.float32)

    def map(self, simulation: Simulation) -> dict[str, int]:
        problem = self.problem
        at = {"out": simulation.map(self.out), "lse": simulation.map(self.lse)}
        mapped: dict[int, int] = {}
        for name in (
            *("query", "key", "value", "query_start_loc", "seq_lens"),
            *("block_table", "kv_start_loc", "alibi_slopes", "sinks"),
        ):
            tensor: torch.Tensor | None = getattr(problem, name)
            if tensor is None:
                at[name] = 0
                continue
            at[name] = address_of(tensor, simulation, mapped)
        return at


def variant_of(problem: AttentionProblem) -> Variant:
    adjusted = problem.softcap > 0 or problem.alibi_slopes is not None
    return volta_kernels.prefill(problem.query.shape[2], adjusted=adjusted)


def prefill(problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
    variant, memory = variant_of(problem), Memory(problem)
    simulation = Simulation(cubin(variant), variant.kernels[0])
    kv_heads = problem.key.shape[-2]
    group = problem.query.shape[1] // kv_heads
    most_rows = group * int(torch.diff(problem.query_start_loc).max())
    grid = volta_kernels.prefill_grid(variant, most_rows, kv_heads, len(problem.seq_lens))
    simulation.launch(
        grid, (variant.threads, 1, 1), bytes(parameters(problem, memory.map(simulation))), variant.shared_bytes
    )
    execute_all(simulation, grid)
    return torch.from_numpy(memory.out), torch.from_numpy(memory.lse)


def decode(problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
    head_size, kv_heads = problem.query.shape[2], problem.key.shape[-2]
    variant, memory = volta_kernels.decode(head_size), Memory(problem)
    seqs, parts = len(problem.seq_lens), volta_kernels.most_parts(int(problem.seq_lens.max()))
    partial_out = numpy.full((seqs, kv_heads, parts, DECODE_ROWS, head_size), numpy.nan, numpy.float32)
    partial_lse = numpy.full((seqs, kv_heads, parts, DECODE_ROWS), numpy.nan, numpy.float32)
    group = problem.query.shape[1] // kv_heads
    rows = group * int(torch.diff(problem.query_start_loc).max())
    for kernel, grid, threads, shared in (
        (variant.kernels[0], (parts, kv_heads, seqs), variant.threads, variant.shared_bytes),
        (variant.kernels[1], (rows, kv_heads, seqs), head_size, 0),
    ):
        simulation = Simulation(cubin(variant), kernel)
        whole = Decode(
            parameters(problem, memory.map(simulation)), simulation.map(partial_out), simulation.map(partial_lse), parts
        )
        simulation.launch(grid, (threads, 1, 1), bytes(whole), shared)
        execute_all(simulation, grid)
    return torch.from_numpy(memory.out), torch.from_numpy(memory.lse)


def write_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    simulation = Simulation(cubin(volta_kernels.WRITE_KV), volta_kernels.WRITE_KV.kernels[0])
    mapped: dict[int, int] = {}
    at = {
        name: address_of(tensor, simulation, mapped)
        for name, tensor in (
            *(("key", key), ("value", value), ("key_cache", key_cache), ("value_cache", value_cache)),
            ("slot_mapping", slots),
        )
    }
    parameters = WriteKv(
        **at,
        token_stride=key.stride(0),
        head_stride=key.stride(1),
        block_stride=key_cache.stride(0),
        page_token_stride=key_cache.stride(1),
        page_head_stride=key_cache.stride(2),
        page_size=key_cache.shape[1],
        num_kv_heads=key.shape[1],
        head_size=key.shape[2],
    )
    grid = (len(slots), 1, 1)
    simulation.launch(grid, (volta_kernels.WRITE_KV.threads, 1, 1), bytes(parameters))
    execute_all(simulation, grid)


def execute_all(simulation: Simulation, grid: tuple[int, int, int]) -> None:
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                simulation.execute(x, y, z)


def check(problem: AttentionProblem, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    real = int(problem.query_start_loc[-1])
    out, lse = oracle.attention(problem)
    assert (found[0][real:] == 7).all(), "rows of padding were touched"
    worst = float((found[0][:real].double() - out[:real]).abs().max())
    assert worst < TOLERANCE, f"outputs are off by {worst:.2e}"
    torch.testing.assert_close(found[1][:real].double(), lse[:real], rtol=0, atol=LSE_TOLERANCE)
