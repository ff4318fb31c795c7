"""The link's share in a CUDA graph: the device's kernels read the first blocks of each context in pinned memory.

Where the CPU alone does not reach the memory's rate, the device reads a part over the link meanwhile. In a graph
nothing is copied first, because what a step needs is not known when the graph is captured: the attention kernel reads
the host's pages in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fastattention_vllm.placement.graph_shares import Contexts, Shares, table_after
from fastattention_vllm.placement.link import Link

if TYPE_CHECKING:
    from fastattention_vllm.placement.graph_calls import GraphBatch
    from fastattention_vllm.placement.host_attention import HostAttention


class GraphLink:
    """How much of each context the device reads over the link, where a graph reads it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._fraction = link.staging(4).view(torch.float32)
        self._layers: dict[str, set[HostAttention]] = {}
        """By block table: the layers whose graphs share their contexts."""
        self._tokens: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """By block table: tokens that one layer has read over the link, int64 ``[1]`` in host memory, and as
        the device sees it."""

    def set_fraction(self, fraction: float) -> None:
        """``fraction`` of each context's whole blocks, 0 to 1, from the next launch on. The last one is the CPU's."""
        self._fraction.fill_(fraction)

    def reserve(self, table: str) -> None:
        """Allocate what graphs of this block table need, before any capture."""
        if table not in self._tokens:
            tokens = self.link.host_buffer(f"{table} tokens over the link", (1,), torch.int64).zero_()
            self._tokens[table] = tokens, self.link.visible(tokens)

    def add(self, table: str, layer: HostAttention) -> None:
        """A captured graph shares this layer's contexts."""
        self._layers.setdefault(table, set()).add(layer)

    def share(self, batch: GraphBatch, block_size: int) -> Shares:
        """Computed on the device, without waiting for it.

        Whole blocks before this step's tokens, which the CPU stores at the same time. The last one is the CPU's,
        because another request of the same step may complete it: vLLM lets a request begin with a block that is being
        written. All tokens of a request see all of these blocks, so a block is read once for all.
        """
        contexts = Contexts.of(batch)
        whole = (contexts.lengths - contexts.new) // block_size
        counts = torch.minimum((self._fraction * whole).long(), (whole - 1).clamp(min=0))
        on_device = (counts * block_size).int()
        self._tokens[batch.table][1].add_(on_device.sum())
        return Shares(
            seq_lens=on_device,
            query_start_loc=batch.query_start_loc,
            rows=batch.block_table,
            sees_nothing=(on_device[contexts.of_token] == 0) | ~contexts.real,
            max_seq_len=batch.block_table.shape[1] * block_size,
            max_query_len=-(-len(batch.slot_mapping) // len(on_device)),
            left=contexts.lengths - on_device,
            left_table=table_after(batch.block_table, counts),
        )

    def bytes_read(self) -> int:
        """Bytes of keys and values that graphs have read over the link."""
        return sum(
            int(self._tokens[table][0]) * sum(layer.cache[0].nbytes // layer.block_size for layer in layers)
            for table, layers in self._layers.items()
        )
