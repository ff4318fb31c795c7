"""Measures how fast the CPU and the link read host KV. stream_split.py derives the share of each in a decoding step.

Both read the same memory and slow each other down. The link helps only if the CPU alone does not reach the memory's
rate (few cores, or many query heads per KV head). So the rates are measured while both read at the same time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from fastattention_vllm.attention.cpu import kernels as cpu_kernels
from fastattention_vllm.attention.cpu.roofline import PageReader, ReadMethod
from fastattention_vllm.placement.host_attention import HostAttention
from fastattention_vllm.placement.link import Link
from fastattention_vllm.placement.stream_split import SAMPLE_BYTES, Rates

IN_PLACE_BYTES = 256 << 20
PAGE_BYTES = 1 << 20
ROUNDS = 3


def alone() -> None:
    """Nobody else reads this memory."""


def measure(
    layer: HostAttention, num_heads: int, dtype: torch.dtype, tokens: int = 1, *, together: Callable[[], object] = alone
) -> Rates:
    """Read a sample of ``layer``'s pages, which are still zero, in all ways. Takes about a second.

    Args:
        tokens: Of one request in a decode step. They share one read, which takes the CPU longer if there are more.
        together: Called before each read. Ranks of a tensor-parallel group wait there for each other: when decoding,
            they read at the same time, and often from the same memory.
    """
    cache, link = layer.cache, layer.group.link
    blocks = min(cache.shape[0], max(1, SAMPLE_BYTES // cache[:1].nbytes))
    sample = cache[:blocks]
    table = torch.arange(blocks, dtype=torch.int32)[None]
    problem = layer.layer.problem(
        query=torch.zeros(tokens, num_heads, layer.pages.key.shape[-1], dtype=dtype),
        **layer.in_cache(),
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
        seq_lens=torch.tensor([blocks * cache.shape[2]], dtype=torch.int32),
        block_table=table,
        causal=True,
        window=(-1, -1),
    )
    staging = layer.group.prefetcher.view(0, cache)
    some = torch.arange(min(len(staging), blocks))
    staged = len(some) * cache[:1].nbytes
    cpu = _rate(lambda: cpu_kernels.run(problem), sample.nbytes, together)
    up = _rate(lambda: link.wait_on_host(link.fetch(cache, some, staging, [])), staged, together)
    # Enough transfers to outlast the CPU, which the link may slow down to half its speed.
    transfers = 1 + int(2 * sample.nbytes / cpu * up / staged)
    cpu_beside, up_beside = _rates_together(
        lambda: cpu_kernels.run(problem),
        sample.nbytes,
        lambda: [link.fetch(cache, some, staging, []) for _ in range(transfers)][-1],
        transfers * staged,
        link,
        up,
        together,
    )
    plain = plain_read_rate(sample, together)
    in_place = in_place_rate(layer, num_heads, dtype, tokens, together)
    return Rates(plain, cpu, up, cpu_beside, up_beside, in_place)


def in_place_rate(
    layer: HostAttention, num_heads: int, dtype: torch.dtype, queries: int, together: Callable[[], object] = alone
) -> float:
    """Bytes per second that the device's kernels read in ``layer``'s pages on the host; 0 if a graph cannot do that.

    ``queries``: of one request. With several, some kernels read a page more than once.
    """
    device: Any = layer.group.device
    link, pages = layer.group.link, layer.device_pages
    if not hasattr(device, "run_in_graph") or layer.rounds or not layer.layer.merges():
        return 0.0
    blocks = min(layer.cache.shape[0], max(1, IN_PLACE_BYTES // layer.cache[:1].nbytes))
    tokens, where = blocks * layer.block_size, pages.key.device
    problem = layer.layer.problem(
        query=torch.zeros(queries, num_heads, pages.key.shape[-1], dtype=dtype, device=where),
        key=pages.key,
        value=pages.value,
        query_start_loc=torch.tensor([0, queries], dtype=torch.int32, device=where),
        seq_lens=torch.tensor([tokens], dtype=torch.int32, device=where),
        block_table=torch.arange(blocks, dtype=torch.int32, device=where)[None],
        causal=False,
        window=(-1, -1),
        sinks=None,
    )
    if device.can_run(problem) is not None:
        return 0.0

    def read() -> None:
        device.run_in_graph(problem, tokens, queries)
        link.wait_on_host(link.mark())

    return _rate(read, blocks * layer.cache[:1].nbytes, together)


def plain_read_rate(sample: torch.Tensor, together: Callable[[], object] = alone) -> float:
    """Bytes per second of plain reads of ``sample`` by the attention threads, up to :data:`SAMPLE_BYTES` of it."""
    page = min(PAGE_BYTES, sample.nbytes)
    ends = range(page, min(sample.nbytes, SAMPLE_BYTES) + 1, page)
    reader = PageReader([sample.data_ptr() + end - page for end in ends], [page] * len(ends))
    methods = [ReadMethod(streams=streams) for streams in (1, 2, 4)]
    return max(_rate(functools.partial(reader.read, method), reader.total_bytes, together) for method in methods)


def _rates_together(
    attend: Callable[[], object],
    attended: int,
    transfer: Callable[[], Any],
    moved: int,
    link: Link,
    undisturbed: float,
    together: Callable[[], object],
) -> tuple[float, float]:
    """The rates of ``attend`` and ``transfer`` together.

    ``transfer`` begins first and ends last; after ``attend`` has ended, it runs at its rate ``undisturbed``.
    """
    rates = []
    for _ in range(ROUNDS):
        together()
        started = time.perf_counter()
        point = transfer()
        both = time.perf_counter()
        attend()
        cpu_done = time.perf_counter()
        link.wait_on_host(point)
        after = time.perf_counter() - cpu_done
        seconds = cpu_done - started
        rates.append((attended / (cpu_done - both), max(0.0, moved - undisturbed * after) / seconds))
    return max(rates, key=sum)


def _rate(work: Callable[[], object], size: int, together: Callable[[], object]) -> float:
    """The best rate of a few rounds."""
    best = float("inf")
    for _ in range(ROUNDS + 1):
        together()
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return size / best
