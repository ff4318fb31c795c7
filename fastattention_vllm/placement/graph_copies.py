"""Copies of host layers' blocks (``resident.py``) in a CUDA graph.

Which blocks have copies is in a tensor on the device, which the host fills before each step. The first host layer of a
step computes from it what the device finds in its copies, and what is left for the CPU. If nothing is left, no layer
rings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fastattention_vllm.placement.graph_shares import Contexts, CopiesWritten, Shares, table_after
from fastattention_vllm.placement.link import Link
from fastattention_vllm.placement.resident import NONE, ResidentBlocks

if TYPE_CHECKING:
    from fastattention_vllm.placement.graph_calls import GraphBatch


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
        block_size, table, slots = self.block_size, batch.block_table.long(), batch.slot_mapping
        contexts = Contexts.of(batch)
        lengths, of_token = contexts.lengths, contexts.of_token
        rows = self.row_of[table]
        places = torch.arange(table.shape[1], device=table.device)
        there = ((rows != NONE) & (places * block_size < lengths[:, None])).cumprod(1)
        if not batch.causal:  # a token also sees keys after it, and the CPU attends to everything
            there = torch.zeros_like(there)
        counts = there.sum(1)
        on_device = torch.minimum(counts * block_size, lengths).int()
        left = lengths - on_device
        nothing_left = (left.sum() == 0).int()[None]
        seen = torch.where(contexts.real, torch.minimum(contexts.position + 1, on_device[of_token]), 0).int()
        row = self.row_of[slots.clamp(min=0) // block_size].long()
        copied = torch.where((slots >= 0) & (row != NONE), row * block_size + slots % block_size, NONE)
        return Shares(
            seq_lens=seen,
            query_start_loc=torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device),
            rows=torch.where(there.bool(), rows, 0)[of_token],
            sees_nothing=seen == 0,
            max_seq_len=min(table.shape[1], len(self.blocks.block_of)) * block_size,
            max_query_len=1,
            left=left,
            left_table=table_after(batch.block_table, counts),
            asks_cpu=left[of_token] > 0,
            nothing_left=nothing_left,
            written=CopiesWritten(copied, torch.where(nothing_left.bool(), slots, NONE)),
        )
