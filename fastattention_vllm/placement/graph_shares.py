"""How the device and the CPU share a batch in a CUDA graph: what both sources of the device's share have in common.

A graph's sizes are fixed, and lengths, block tables and slots are in vLLM's buffers on the device. So the graph itself
computes who attends to what, once per step. The device attends to the first blocks of a context, and the CPU to the
rest. The device finds its blocks in copies of its own (``graph_copies.py``), or reads them over the link, in pinned
memory (``graph_link.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from fastattention_vllm.attention.kernels import StoresKv
from fastattention_vllm.attention.problem import AttentionProblem

if TYPE_CHECKING:
    from fastattention_vllm.placement.graph_calls import GraphBatch


class GraphDevice(StoresKv, Protocol):
    """The device's kernels as a graph calls them."""

    def can_run(self, problem: AttentionProblem) -> str | None:
        """Why they cannot compute ``problem``; None if they can."""

    def run_in_graph(
        self, problem: AttentionProblem, max_seq_len: int, max_query_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``out`` and ``lse`` of sequences whose lengths are on the device; anything for length 0 and for padding.

        ``max_seq_len``: no sequence is longer. ``max_query_len``: none has more queries.
        """


@dataclass(frozen=True)
class CopiesWritten:
    """Where the device itself stores a step's keys and values. ``[num_tokens]`` int64, on the device; -1: nowhere."""

    slots: torch.Tensor
    """In its copies."""
    host_slots: torch.Tensor
    """On the host, if the CPU will not."""


@dataclass(frozen=True)
class Shares:
    """How a graph's batch is shared by the device and the CPU. All tensors are on the device."""

    seq_lens: torch.Tensor
    """``[sequences]`` int32: the keys of the device's share. A sequence is a request or a token."""
    query_start_loc: torch.Tensor
    """``[sequences + 1]`` int32."""
    rows: torch.Tensor
    """``[sequences, max_blocks]`` int32: where the device finds these keys; anything elsewhere."""
    sees_nothing: torch.Tensor
    """``[num_tokens]``: whether the token sees none of these keys, or is padding."""
    max_seq_len: int
    max_query_len: int
    left: torch.Tensor
    """``[num_seqs]`` int32: the last tokens of each context, to which the CPU attends."""
    left_table: torch.Tensor
    """``[num_seqs, max_blocks]`` int32: their blocks."""
    asks_cpu: torch.Tensor | None = None
    """``[num_tokens]``: whether anything is left of the token's request. None: always."""
    nothing_left: torch.Tensor | None = None
    """``[1]`` int32: 1 if the CPU has nothing to do. None: it always has."""
    written: CopiesWritten | None = None
    """None: the CPU stores the new keys and values."""


@dataclass(frozen=True)
class Contexts:
    """The contexts of a batch, on the device."""

    lengths: torch.Tensor
    """``[num_seqs]``: with this step's tokens; 0 for padding, which may have any length in the batch."""
    new: torch.Tensor
    """``[num_seqs]``: this step's tokens."""
    of_token: torch.Tensor
    """``[num_tokens]``: whose context a token belongs to; anything for padding."""
    position: torch.Tensor
    """``[num_tokens]``: its place there."""
    real: torch.Tensor
    """``[num_tokens]``: False for padding."""

    @classmethod
    def of(cls, batch: GraphBatch) -> Contexts:
        starts, slots = batch.query_start_loc, batch.slot_mapping
        new = starts.diff()
        lengths = torch.where(new > 0, batch.seq_lens, 0)
        tokens = torch.arange(len(slots), device=slots.device)
        of_token = (tokens[:, None] >= starts[None, 1:]).sum(1).clamp(max=len(new) - 1)
        position = lengths[of_token] - (starts[1:][of_token] - tokens)
        return cls(lengths, new, of_token, position, tokens < starts[-1])


def table_after(block_table: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``block_table`` without the first ``counts[i]`` blocks of row i; its last columns repeat the last block."""
    places = torch.arange(block_table.shape[1], device=block_table.device)
    return block_table.gather(1, (places + counts[:, None]).clamp(max=block_table.shape[1] - 1))
