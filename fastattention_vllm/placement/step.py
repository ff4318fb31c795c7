"""One step's batch, and who attends for which of its requests.

Requests with few new tokens go to the CPU, the others stay on the device; see ``host_attention.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MAX_CPU_TOKENS = 8
"""Most new tokens of a request that the CPU takes: they read its KV once."""


@dataclass(frozen=True)
class Batch:
    """One step's requests, as vLLM's metadata has them, on the host."""

    query_start_loc: torch.Tensor
    """``[num_seqs + 1]`` int32."""
    seq_lens: torch.Tensor
    """``[num_seqs]`` int32: KV tokens, this step's included."""
    block_table: torch.Tensor
    """``[num_seqs, max_blocks]`` int32."""
    slot_mapping: torch.Tensor
    """``[num_tokens]`` int64."""
    device_slots: torch.Tensor
    """The same, where the device's ``write_kv`` takes them: on the device, or for an NPU's copies on the host."""
    causal: bool = True


@dataclass(frozen=True)
class CpuRequests:
    """The requests that the CPU attends for, as one problem."""

    rows: slice | torch.Tensor
    """Their tokens in the batch: a run of them, or int64 indices on the host."""
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    contexts: tuple[int, ...]
    """Tokens of each request before its new ones."""
    causal: bool


@dataclass(frozen=True)
class DeviceRequest:
    """A request that the device attends for."""

    rows: slice
    context: int
    """Tokens before the new ones."""
    blocks: torch.Tensor
    """int64, those of its context."""


@dataclass(frozen=True, eq=False)
class Step:
    """A batch, divided. The same for all layers of a block table."""

    batch: Batch
    cpu_requests: CpuRequests | None
    """Requests for the CPU."""
    device_requests: tuple[DeviceRequest, ...]
    """Requests for the device."""
    independent: bool
    """No request begins with blocks that another one, with that prefix too, is just computing."""


def divide(batch: Batch, block_size: int, max_cpu_tokens: int = MAX_CPU_TOKENS) -> Step:
    """Who attends for which request: the CPU for those with at most ``max_cpu_tokens`` new tokens."""
    starts = batch.query_start_loc.tolist()
    lengths = batch.seq_lens.tolist()
    on_cpu, on_device = [], []
    for index, length in enumerate(lengths):
        new = starts[index + 1] - starts[index]
        if 0 < new <= max_cpu_tokens:
            on_cpu.append(index)
        elif new:
            context = length - new
            blocks = batch.block_table[index, : -(-context // block_size)].long()
            on_device.append(DeviceRequest(slice(starts[index], starts[index + 1]), context, blocks))
    return Step(
        batch,
        _cpu_requests(batch, on_cpu, starts) if on_cpu else None,
        tuple(on_device),
        _independent(batch, block_size),
    )


def _independent(batch: Batch, block_size: int) -> bool:
    """Requests share whole blocks only, and write their own behind those: what is written there is another one's."""
    whole = (batch.seq_lens - torch.diff(batch.query_start_loc)) // block_size
    width = int(whole.max()) if len(whole) else 0
    if width == 0:
        return True
    table = batch.block_table[:, :width].long().masked_fill(torch.arange(width) >= whole[:, None], -1)
    written = torch.zeros(int(table.max()) + 2, dtype=torch.bool)  # the last is what -1 stands for
    blocks = batch.slot_mapping // block_size
    written[blocks[(blocks >= 0) & (blocks < len(written) - 1)]] = True
    return not bool(written[table].any())


def _cpu_requests(batch: Batch, requests: Sequence[int], starts: Sequence[int]) -> CpuRequests:
    counts = [starts[index + 1] - starts[index] for index in requests]
    first, last = requests[0], requests[-1]
    neighbours = starts[last + 1] - starts[first] == sum(counts)
    rows: slice | torch.Tensor = slice(starts[first], starts[last + 1])
    if not neighbours:
        rows = torch.cat([torch.arange(starts[index], starts[index + 1]) for index in requests])
    chosen = torch.tensor(requests)
    seq_lens = batch.seq_lens[chosen]
    return CpuRequests(
        rows=rows,
        query_start_loc=torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        seq_lens=seq_lens,
        block_table=batch.block_table[chosen].contiguous(),
        slot_mapping=batch.slot_mapping[rows],
        contexts=tuple(length - count for length, count in zip(seq_lens.tolist(), counts, strict=True)),
        causal=batch.causal,
    )
