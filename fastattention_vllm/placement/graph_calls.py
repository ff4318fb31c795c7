"""Host layers inside a CUDA graph, so that a whole decode step is launched at once.

Normally a host layer ends a piece of the model: Python waits for its query, and launches the next piece when the answer
is there. In a graph, the device copies query, key and value to pinned memory, rings (a number in pinned memory), and
waits for the answer's number. A thread of the CPU kernels' library polls the bell, computes, and answers. Between two
layers there is neither Python nor a launch.

A graph's addresses and sizes are fixed when it is captured. What changes from step to step is the contents of vLLM's
own buffers: lengths, block tables and slots. The first host layer of a step copies them down too.

Between ringing and waiting, the device may attend to a share of its own (``graph_shares.py``). If it has copies of all
that a step needs, it does not ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from fastattention_vllm.attention.cpu import kernels as cpu_kernels
from fastattention_vllm.attention.cpu.graph_calls import DOORBELL_BYTES, GraphThread
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.placement import host_memory, stored_rows
from fastattention_vllm.placement.counters import Counters
from fastattention_vllm.placement.graph_copies import GraphCopies
from fastattention_vllm.placement.graph_link import GraphLink
from fastattention_vllm.placement.graph_shares import GraphDevice, Shares
from fastattention_vllm.placement.host_attention import HostAttention, merge
from fastattention_vllm.placement.link import Link
from fastattention_vllm.placement.pinning import Pinning


class Bell(Protocol):
    """How one kind of device rings."""

    def capturing(self) -> bool:
        """Whether the device's work is being captured in a graph now."""

    def settle(self) -> None:
        """Wait until the device has done everything, so that no graph rings any more."""

    def ring(self, rung: int, answered: int, call: int, unless: int = 0) -> None:
        """In stream order: set the word at ``answered`` to 0, and write ``call`` to the word at ``rung``. Both are
        addresses of 32-bit words in pinned memory.

        ``unless``: 0, or the address of a 32-bit word on the device. If that is not 0, nothing happens.
        """

    def wait(self, answered: int, call: int, unless: int = 0) -> None:
        """In stream order: wait until the word at ``answered`` is ``call``, with the same ``unless``."""


@dataclass(frozen=True, eq=False)
class GraphBatch:
    """A decode batch in the device's own buffers, which keep their addresses. Contents are those of the next step."""

    table: str
    """Names the block table."""
    query_start_loc: torch.Tensor
    """``[num_seqs + 1]`` int32. A padded request has no token."""
    seq_lens: torch.Tensor
    """``[num_seqs]`` int32."""
    block_table: torch.Tensor
    """``[num_seqs, max_blocks]`` int32, contiguous."""
    slot_mapping: torch.Tensor
    """``[num_tokens]`` int64, negative for padding."""
    causal: bool = True


@dataclass(frozen=True)
class GraphStep:
    """A batch that was copied down."""

    batch: GraphBatch
    down: GraphBatch
    """Its copy on the host."""
    left: GraphBatch
    """The same without the device's share."""
    shares: Shares | None
    """How the layers that share do so."""


CHANGING = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
"""The tensors of a :class:`GraphBatch`."""


class GraphCalls:
    """The host attention of one device's graphs.

    Args:
        link: to the device.
        pinning: pins memory for the device.
        cpu: the CPU for the thread that answers, or -1.
        tokens: of one request in a step: one, and the drafted ones.
        device: attends to the device's share; None if it has no kernels for graphs.
    """

    copies: GraphCopies | None = None
    """Which blocks have copies on the device, if any may have."""
    over_link: GraphLink | None = None
    """What the device reads over the link, in graphs that are captured from now on. Not beside :attr:`copies`."""

    def __init__(
        self,
        link: Link,
        pinning: Pinning | None,
        bell: Bell,
        cpu: int = -1,
        device: GraphDevice | None = None,
        tokens: int = 1,
    ) -> None:
        self.link = link
        self.tokens = tokens
        self.device = device
        self.bell = bell
        self._pinning = pinning
        self._buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._steps: dict[str, GraphStep] = {}
        """By block table: the last batch that was copied down."""
        self._layers: dict[HostAttention, AttentionProblem] = {}
        self._sharing: set[HostAttention] = set()
        """The layers that read over the link, if any do."""
        self.thread = GraphThread(cpu, bell.settle)
        if pinning:
            pinning.register(self.thread.rung, DOORBELL_BYTES)

    def prepare(self, layer: HostAttention) -> None:
        """Read a layer's properties, before any capture."""
        none = torch.empty(0, dtype=torch.int32)
        self._layers[layer] = layer.layer.problem(
            query=torch.empty(0, 1, 1),
            **layer.in_cache(),
            query_start_loc=none,
            seq_lens=none,
            block_table=none,
            causal=True,
        )
        if self.can_share(layer):
            self._sharing.add(layer)

    def share_over_link(self, fraction: float) -> bool:
        """Let graphs that are captured from now on read this fraction of contexts over the link, where they can.

        Returns whether any layer will. Not beside copies.
        """
        if fraction == 0 or self.copies or not self._sharing:
            return False
        sizes = {layer.block_size for layer in self._sharing}
        assert len(sizes) == 1, f"the layers have blocks of {sorted(sizes)} tokens"
        self.over_link = GraphLink(self.link)
        self.over_link.set_fraction(fraction)
        return True

    def can_share(self, layer: HostAttention) -> bool:
        """Whether the device's kernels can read this layer's pages over the link, in a graph."""
        pages = layer.device_pages
        if self.device is None or layer.window is not None or layer.rounds or not layer.layer.merges():
            return False
        query = pages.key.new_empty(0, layer.layer.num_heads, pages.key.shape[-1])
        lengths = torch.empty(0, dtype=torch.int32)
        parts = {"query_start_loc": lengths, "seq_lens": lengths, "block_table": lengths, "sinks": None}
        problem = layer.layer.problem(query=query, key=pages.key, value=pages.value, causal=True, **parts)
        return self.device.can_run(problem) is None

    def reserve(self, batch: GraphBatch, dtype: torch.dtype) -> None:
        """Allocate what graphs of this batch need, because memory cannot be pinned during a capture.

        ``dtype``: of queries, keys and values.
        """
        tokens = len(batch.slot_mapping)
        for layer in self._layers:
            kv_heads, size = layer.pages.key.shape[2:]
            heads = layer.layer.num_heads
            self._buffer("rows", (tokens, (heads + 2 * kv_heads) * size), dtype)
            self._buffer("out", (tokens, heads, size), dtype)
            if layer.copies is not None or self.over_link:
                self._buffer("lse", (tokens, heads), torch.float32)
            self._buffer("sinks", (heads,), torch.float32)
        for name in CHANGING:
            tensor: torch.Tensor = getattr(batch, name)
            self._buffer(f"{batch.table} {name}", tensor.shape, tensor.dtype)
            if (self.copies or self.over_link) and name in ("seq_lens", "block_table"):
                self._buffer(f"{batch.table} left {name}", tensor.shape, tensor.dtype)
        if self.over_link:
            self.over_link.reserve(batch.table)

    def bring_down(self, batch: GraphBatch) -> None:
        """Copy a batch's lengths, block tables and slots to the host. Once per step and block table."""
        copies: dict[str, Any] = {}
        for name in CHANGING:
            tensor: torch.Tensor = getattr(batch, name)
            copies[name], seen = self._buffer(f"{batch.table} {name}", tensor.shape, tensor.dtype)
            seen.copy_(tensor)
        down = left = replace(batch, **copies)
        shares = self._share(batch)
        if shares is not None:
            lengths, seen = self._buffer(f"{batch.table} left seq_lens", shares.left.shape, torch.int32)
            seen.copy_(shares.left)
            table, seen = self._buffer(f"{batch.table} left block_table", shares.left_table.shape, torch.int32)
            seen.copy_(shares.left_table)
            left = replace(down, seq_lens=lengths, block_table=table)
        self._steps[batch.table] = GraphStep(batch, down, left, shares)

    def _share(self, batch: GraphBatch) -> Shares | None:
        if self.copies:
            return self.copies.share(batch) if self.copies.table == batch.table else None
        if self.over_link and self._sharing:
            return self.over_link.share(batch, next(iter(self._sharing)).block_size)
        return None

    def attend(
        self,
        layer: HostAttention,
        batch: GraphBatch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Store the batch's keys and values, and compute attention of ``query`` into ``output``.

        All tensors are on the device: ``[num_tokens, heads, head_size]``. Rows of padding become anything.
        :meth:`bring_down` comes first in the same graph, and :meth:`reserve` before the graph.
        """
        step = self._steps[batch.table]
        assert step.batch is batch, f"block table {batch.table} was copied down for another batch"
        sharing = layer.copies is not None or (self.over_link is not None and layer in self._sharing)
        shares, down = (step.shares, step.left) if sharing else (None, step.down)
        assert layer.copies is None or shares is not None, "the copies would not get this step's keys and values"
        tokens, parts = len(query), (query, key, value)
        widths = [part.shape[1] * part.shape[2] for part in parts]
        rows, rows_seen = self._buffer("rows", (tokens, sum(widths)), query.dtype)
        torch.cat([part.flatten(1) for part in parts], dim=1, out=rows_seen)
        query_there, key_there, value_there = (
            columns.unflatten(1, part.shape[1:]) for columns, part in zip(rows.split(widths, dim=1), parts, strict=True)
        )
        out, out_seen = self._buffer("out", query.shape, query.dtype)
        sinks = self._on_device(layer, batch, query, key, value).sinks
        sinks_there = None
        if sinks is not None and shares is None:  # a weight, which may be loaded again
            sinks_there, sinks_seen = self._buffer("sinks", sinks.shape, torch.float32)
            sinks_seen.copy_(sinks)
        problem = replace(
            self._layers[layer],
            query=query_there,
            sinks=sinks_there,
            query_start_loc=down.query_start_loc,
            seq_lens=down.seq_lens,
            block_table=down.block_table,
            causal=batch.causal,
        )
        write = cpu_kernels.write_arguments(
            key_there,
            value_there,
            layer.pages.key,
            layer.pages.value,
            down.slot_mapping,
            **layer.stores(),
        )
        if shares is None:
            attention, *_ = cpu_kernels.attention_arguments(problem, out, None, False)
            call = self.thread.add(write, attention, problem, step.down, rows, out)
            self.bell.ring(self.thread.rung, self.thread.answered, call)
            self.bell.wait(self.thread.answered, call)
            output[:tokens].copy_(out_seen)
            return
        lse, lse_seen = self._buffer("lse", query.shape[:2], torch.float32)
        attention, *_ = cpu_kernels.attention_arguments(problem, out, lse, False)
        call = self.thread.add(write, attention, problem, step.down, rows, out, lse)
        unless = 0 if shares.nothing_left is None else shares.nothing_left.data_ptr()
        self.bell.ring(self.thread.rung, self.thread.answered, call, unless)
        total, total_lse = self._attend_to_share(layer, batch, shares, query, key, value)
        self.bell.wait(self.thread.answered, call, unless)
        part, part_lse = out_seen, lse_seen
        if shares.asks_cpu is not None:  # without a ring, the buffers hold the answer to another call
            asks = shares.asks_cpu[:, None]
            part, part_lse = part.masked_fill(~asks[..., None], 0.0), part_lse.masked_fill(~asks, -torch.inf)
        merge(total, total_lse, part, part_lse)
        if sinks is not None:  # they are one more key, with value zero
            total.mul_(torch.sigmoid(total_lse - sinks.float())[..., None])
        output[:tokens].copy_(total)

    def _attend_to_share(
        self,
        layer: HostAttention,
        batch: GraphBatch,
        shares: Shares,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the device's share, and first store in it what belongs there.

        Returns fp32 ``out`` and ``lse``; 0 and -inf for tokens that see nothing of it.
        """
        assert self.device is not None
        pages = layer.device_pages
        if shares.written is not None:
            assert layer.copies is not None
            scales = layer.layer.scales()
            self.device.write_kv(key, value, pages.key, pages.value, shares.written.host_slots, *scales)
            pages = stored_rows.pages_of(layer.copies)
            self.device.write_kv(key, value, pages.key, pages.value, shares.written.slots, *scales)
        else:
            assert self.over_link is not None
            self.over_link.add(batch.table, layer)
        problem = layer.layer.problem(
            query=query,
            key=pages.key,
            value=pages.value,
            query_start_loc=shares.query_start_loc,
            seq_lens=shares.seq_lens,
            block_table=shares.rows,
            causal=False,  # each sequence's keys are all before its queries, or it has one query
            sinks=None,
        )
        out, lse = self.device.run_in_graph(problem, shares.max_seq_len, shares.max_query_len)
        none = shares.sees_nothing[:, None]
        return out.float().masked_fill(none[..., None], 0.0), lse.masked_fill(none, -torch.inf)

    def _on_device(self, layer: HostAttention, batch: GraphBatch, *parts: torch.Tensor) -> AttentionProblem:
        """The layer's problem with its weights where they are."""
        query, key, value = parts
        starts, lengths = batch.query_start_loc, batch.seq_lens
        return layer.layer.problem(
            query=query, key=key, value=value, query_start_loc=starts, seq_lens=lengths, causal=batch.causal
        )

    def counters(self) -> Counters:
        """What the CPU has done for graphs, and what these have read over the link."""
        found = self.thread.counters()
        seconds = found.nanoseconds * 1e-9
        streamed = self.over_link.bytes_read() if self.over_link else 0
        return Counters(
            cpu_seconds=seconds,
            cpu_bytes=found.kv_bytes,
            decode_streamed_bytes=streamed,
            device_wait_seconds=seconds,
        )

    def _buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Pinned memory, and the same memory as the device sees it.

        One of a name is in use at a time, so later calls get the same memory if it is large enough. Calls keep what
        they were given, so a graph's memory outlives a larger buffer of the same name.
        """
        size = torch.Size(shape).numel() * dtype.itemsize
        kept = self._buffers.get(name)
        if kept is None or kept[0].nbytes < size:
            assert not self.bell.capturing(), f"{name} of {size} bytes was not reserved before the capture"
            memory, _ = host_memory.commit(size, pin=self._pinning)
            kept = self._buffers[name] = memory, self.link.visible(memory)
        host, seen = (bytes_[:size].view(dtype).view(torch.Size(shape)) for bytes_ in kept)
        return host, seen
