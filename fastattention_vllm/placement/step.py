"""One step's batch, divided into requests for the CPU and requests for the device.

Requests with few new tokens go to the CPU; the others stay on the device. See ``host_attention.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MAX_CPU_TOKENS = 8
"""Maximum number of new tokens of a CPU request. The CPU reads the request's KV once for all of them."""


@dataclass(frozen=True)
class Batch:
    """One step's requests as in vLLM's metadata, on the host."""

    query_start_loc: torch.Tensor
    """``[num_seqs + 1]`` int32."""
    seq_lens: torch.Tensor
    """``[num_seqs]`` int32: KV tokens, including this step's tokens."""
    block_table: torch.Tensor
    """``[num_seqs, max_blocks]`` int32."""
    slot_mapping: torch.Tensor
    """``[num_tokens]`` int64."""
    device_slots: torch.Tensor
    """The same slots where the device's ``write_kv`` needs them: on the device, or for an NPU's copies on the host."""
    causal: bool = True


@dataclass(frozen=True)
class CpuRequests:
    """The requests that the CPU computes, as one problem."""

    rows: slice | torch.Tensor
    """Their tokens in the batch: a slice, or int64 indices on the host."""
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    contexts: tuple[int, ...]
    """For each request, the number of tokens before its new tokens."""
    causal: bool
    numbers: tuple[int, ...]
    """Their places in the batch."""


@dataclass(frozen=True)
class DeviceRequest:
    """A request that the device computes."""

    rows: slice
    context: int
    """Number of tokens before the new tokens."""
    blocks: torch.Tensor
    """The blocks of its context, int64."""
    number: int = 0
    """Its place in the batch."""


@dataclass(frozen=True, eq=False)
class Step:
    """A divided batch. All layers of a block table share it."""

    batch: Batch
    cpu_requests: CpuRequests | None
    """Requests for the CPU."""
    device_requests: tuple[DeviceRequest, ...]
    """Requests for the device."""
    independent: bool
    """True if no request in this batch shares a prefix block that another request is still computing."""


def divide(batch: Batch, block_size: int, max_cpu_tokens: int = MAX_CPU_TOKENS) -> Step:
    """Divide a batch: the CPU takes the requests with at most ``max_cpu_tokens`` new tokens."""
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
            on_device.append(DeviceRequest(slice(starts[index], starts[index + 1]), context, blocks, index))
    return Step(
        batch,
        _cpu_requests(batch, on_cpu, starts) if on_cpu else None,
        tuple(on_device),
        _independent(batch, block_size),
    )


def _independent(batch: Batch, block_size: int) -> bool:
    """See :attr:`Step.independent`.

    Requests share only whole blocks, and write only to blocks after these. So a write to a request's whole context
    blocks comes from another request.
    """
    whole = (batch.seq_lens - torch.diff(batch.query_start_loc)) // block_size
    width = int(whole.max()) if len(whole) else 0
    if width == 0:
        return True
    table = batch.block_table[:, :width].long().masked_fill(torch.arange(width) >= whole[:, None], -1)
    written = torch.zeros(int(table.max()) + 2, dtype=torch.bool)  # -1 in the table selects the last element
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
        numbers=tuple(requests),
    )
