"""Copies of host layers' blocks (``resident.py``) in a CUDA graph: the graph itself computes who attends to what.

A graph's sizes are fixed, and lengths, block tables and slots are in vLLM's buffers on the device. Which blocks have
copies is in a tensor there, too, which the host fills before each step. The first host layer of a step computes from
them what the device finds in its copies, and what is left for the CPU. If nothing is left, no layer rings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.placement.link import Link
from fastattention_vllm.placement.resident import NONE, ResidentBlocks

if TYPE_CHECKING:
    from fastattention_vllm.placement.graph_calls import GraphBatch


class GraphDevice(Protocol):
    """The device's kernels as a graph calls them."""

    def run_in_graph(self, problem: AttentionProblem, max_seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``out`` and ``lse`` of sequences of one token each, whose lengths are on the device; anything for length 0.

        ``max_seq_len``: no sequence is longer.
        """

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None: ...


@dataclass(frozen=True)
class Shares:
    """How a graph's batch is shared by the device and the CPU. All tensors are on the device."""

    seq_lens: torch.Tensor
    """``[num_tokens]`` int32: the keys in the copies that each token sees; 0 for padding."""
    query_start_loc: torch.Tensor
    """``[num_tokens + 1]`` int32: each token is a sequence."""
    rows: torch.Tensor
    """``[num_tokens, max_blocks]`` int32: the copies' rows of these keys, 0 elsewhere."""
    max_seq_len: int
    slots: torch.Tensor
    """``[num_tokens]`` int64: where the copy of each new token belongs; -1: nowhere."""
    host_slots: torch.Tensor
    """``[num_tokens]`` int64: where the device stores each new token on the host; -1 if the CPU does."""
    left: torch.Tensor
    """``[num_seqs]`` int32: the last tokens of each context, to which the CPU attends."""
    left_table: torch.Tensor
    """``[num_seqs, max_blocks]`` int32: their blocks."""
    asks_cpu: torch.Tensor
    """``[num_tokens]``: whether anything is left of the token's request."""
    nothing_left: torch.Tensor
    """``[1]`` int32: 1 if the CPU has nothing to do."""


class GraphCopies:
    """Which blocks have copies, where a graph reads it."""

    def __init__(self, link: Link, blocks: ResidentBlocks, block_size: int) -> None:
        self.link = link
        self.blocks = blocks
        self.block_size = block_size
        self.table: str | None = None
        """The block table of the layers with copies, in a :class:`GraphBatch`."""
        self.row_of = link.staging(blocks.row_of.nbytes).view(torch.int32).fill_(NONE)

    def bring_up(self) -> None:
        """Copy what the host has decided to the device, before a step's graph is launched."""
        self.row_of.copy_(self.link.to_device(self.blocks.row_of))

    def share(self, batch: GraphBatch) -> Shares:
        """Computed on the device, without waiting for it."""
        block_size = self.block_size
        starts, table = batch.query_start_loc, batch.block_table.long()
        new = starts.diff()
        lengths = torch.where(new > 0, batch.seq_lens, 0)  # padding may have any length
        places = torch.arange(table.shape[1], device=table.device)
        rows = self.row_of[table]
        there = ((rows != NONE) & (places * block_size < lengths[:, None])).cumprod(1)
        if not batch.causal:  # a token also sees keys after it, and the CPU attends to everything
            there = torch.zeros_like(there)
        counts = there.sum(1)
        on_device = torch.minimum(counts * block_size, lengths).int()
        left = lengths - on_device
        left_table = batch.block_table.gather(1, (places + counts[:, None]).clamp(max=table.shape[1] - 1))
        nothing_left = (left.sum() == 0).int()[None]

        slots = batch.slot_mapping
        tokens = torch.arange(len(slots), device=slots.device)
        of_token = (tokens[:, None] >= starts[None, 1:]).sum(1).clamp(max=len(new) - 1)
        position = lengths[of_token] - (starts[1:][of_token] - tokens)
        seen = torch.where(tokens < starts[-1], torch.minimum(position + 1, on_device[of_token]), 0)
        row = self.row_of[slots.clamp(min=0) // block_size].long()
        copied = torch.where((slots >= 0) & (row != NONE), row * block_size + slots % block_size, NONE)
        return Shares(
            seq_lens=seen.int(),
            query_start_loc=torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device),
            rows=torch.where(there.bool(), rows, 0)[of_token],
            max_seq_len=min(table.shape[1], len(self.blocks.block_of)) * block_size,
            slots=copied,
            host_slots=torch.where(nothing_left.bool(), slots, NONE),
            left=left,
            left_table=left_table,
            asks_cpu=left[of_token] > 0,
            nothing_left=nothing_left,
        )
