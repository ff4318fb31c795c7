"""Host layers inside a CUDA graph, so that a whole decode step is launched at once.

Normally a host layer ends a piece of the model: Python waits for its query, and launches the next piece when the answer
is there. In a graph, the device copies query, key and value to pinned memory, rings (a number in pinned memory), and
waits for the answer's number. A thread of the CPU kernels' library polls the bell, computes, and answers. Between two
layers there is neither Python nor a launch.

A graph's addresses and sizes are fixed when it is captured. What changes from step to step is the contents of vLLM's
own buffers: lengths, block tables and slots. The first host layer of a step copies them down too.

If the device has copies of blocks, it attends to these before it rings, and the CPU to what is left. If nothing is
left, it does not ring (``graph_copies.py``).
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
from fastattention_vllm.placement.graph_copies import GraphCopies, GraphDevice, Shares
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
        """In stream order: set the word at ``answered`` to 0, write ``call`` to the word at ``rung``, and wait until
        ``answered`` is ``call``. Both are addresses of 32-bit words in pinned memory.

        ``unless``: 0, or the address of a 32-bit word on the device. If that is not 0, nothing happens.
        """


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
    """The same without what the device finds in its copies of blocks."""
    shares: Shares | None
    """How the layers with copies share it."""


CHANGING = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
"""The tensors of a :class:`GraphBatch`."""


class GraphCalls:
    """The host attention of one device's graphs.

    Args:
        link: to the device.
        pinning: pins memory for the device.
        cpu: the CPU for the thread that answers, or -1.
        device: attends to copies of blocks; None if there are none.
    """

    copies: GraphCopies | None = None
    """Which blocks have copies on the device, if any may have."""

    def __init__(
        self, link: Link, pinning: Pinning | None, bell: Bell, cpu: int = -1, device: GraphDevice | None = None
    ) -> None:
        self.link = link
        self.device = device
        self.bell = bell
        self._pinning = pinning
        self._buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._steps: dict[str, GraphStep] = {}
        """By block table: the last batch that was copied down."""
        self._layers: dict[HostAttention, AttentionProblem] = {}
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
            if layer.copies is not None:
                self._buffer("lse", (tokens, heads), torch.float32)
            self._buffer("sinks", (heads,), torch.float32)
        for name in CHANGING:
            tensor: torch.Tensor = getattr(batch, name)
            self._buffer(f"{batch.table} {name}", tensor.shape, tensor.dtype)
            if self.copies and name in ("seq_lens", "block_table"):
                self._buffer(f"{batch.table} left {name}", tensor.shape, tensor.dtype)

    def bring_down(self, batch: GraphBatch) -> None:
        """Copy a batch's lengths, block tables and slots to the host. Once per step and block table."""
        copies: dict[str, Any] = {}
        for name in CHANGING:
            tensor: torch.Tensor = getattr(batch, name)
            copies[name], seen = self._buffer(f"{batch.table} {name}", tensor.shape, tensor.dtype)
            seen.copy_(tensor)
        down = left = replace(batch, **copies)
        shares = None
        if self.copies and self.copies.table == batch.table:
            shares = self.copies.share(batch)
            lengths, seen = self._buffer(f"{batch.table} left seq_lens", shares.left.shape, torch.int32)
            seen.copy_(shares.left)
            table, seen = self._buffer(f"{batch.table} left block_table", shares.left_table.shape, torch.int32)
            seen.copy_(shares.left_table)
            left = replace(down, seq_lens=lengths, block_table=table)
        self._steps[batch.table] = GraphStep(batch, down, left, shares)

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
        shares, down = (step.shares, step.left) if layer.copies is not None else (None, step.down)
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
            call = self.thread.add(write, attention, problem, down, rows, out)
            self.bell.ring(self.thread.rung, self.thread.answered, call)
            output[:tokens].copy_(out_seen)
            return
        lse, lse_seen = self._buffer("lse", query.shape[:2], torch.float32)
        attention, *_ = cpu_kernels.attention_arguments(problem, out, lse, False)
        call = self.thread.add(write, attention, problem, down, rows, out, lse)
        total, total_lse = self._attend_to_copies(layer, shares, query, key, value)
        self.bell.ring(self.thread.rung, self.thread.answered, call, shares.nothing_left.data_ptr())
        # Without a ring, the buffers hold the answer to another call.
        asks = shares.asks_cpu[:, None]
        part, part_lse = out_seen.masked_fill(~asks[..., None], 0.0), lse_seen.masked_fill(~asks, -torch.inf)
        merge(total, total_lse, part, part_lse)
        if sinks is not None:  # they are one more key, with value zero
            total.mul_(torch.sigmoid(total_lse - sinks.float())[..., None])
        output[:tokens].copy_(total)

    def _attend_to_copies(
        self, layer: HostAttention, shares: Shares, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values in the copies, and on the host if the CPU will not; attend to the copies.

        Returns fp32 ``out`` and ``lse``; 0 and -inf for tokens that see no copy.
        """
        assert layer.copies is not None
        assert self.device is not None
        pages, on_host, scales = stored_rows.pages_of(layer.copies), layer.device_pages, layer.layer.scales()
        self.device.write_kv(key, value, pages.key, pages.value, shares.slots, *scales)
        self.device.write_kv(key, value, on_host.key, on_host.value, shares.host_slots, *scales)
        problem = layer.layer.problem(
            query=query,
            key=pages.key,
            value=pages.value,
            query_start_loc=shares.query_start_loc,
            seq_lens=shares.seq_lens,
            block_table=shares.rows,
            causal=True,
            sinks=None,
        )
        out, lse = self.device.run_in_graph(problem, shares.max_seq_len)
        none = (shares.seq_lens == 0)[:, None]
        return out.float().masked_fill(none[..., None], 0.0), lse.masked_fill(none, -torch.inf)

    def _on_device(self, layer: HostAttention, batch: GraphBatch, *parts: torch.Tensor) -> AttentionProblem:
        """The layer's problem with its weights where they are."""
        query, key, value = parts
        starts, lengths = batch.query_start_loc, batch.seq_lens
        return layer.layer.problem(
            query=query, key=key, value=value, query_start_loc=starts, seq_lens=lengths, causal=batch.causal
        )

    def counters(self) -> Counters:
        """What the CPU has done for graphs."""
        found = self.thread.counters()
        seconds = found.nanoseconds * 1e-9
        return Counters(cpu_seconds=seconds, cpu_bytes=found.kv_bytes, device_wait_seconds=seconds)

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
