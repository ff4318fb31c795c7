"""Host layers inside a CUDA graph, so that a whole decode step is launched at once.

Normally a host layer ends a piece of the model: Python waits for its query, and launches the next piece when the answer
is there. In a graph, the device copies query, key and value to pinned memory, rings (a number in pinned memory), and
waits for the answer's number. A thread of the CPU kernels' library polls the bell, computes, and answers. Between two
layers there is neither Python nor a launch.

A graph's addresses and sizes are fixed when it is captured. What changes from step to step is the contents of vLLM's
own buffers: lengths, block tables and slots. The first host layer of a step copies them down too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from fastattention_vllm.attention.cpu import kernels as cpu_kernels
from fastattention_vllm.attention.cpu.graph_calls import DOORBELL_BYTES, GraphThread
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.placement import host_memory
from fastattention_vllm.placement.counters import Counters
from fastattention_vllm.placement.host_attention import HostAttention
from fastattention_vllm.placement.link import Link
from fastattention_vllm.placement.pinning import Pinning


class Bell(Protocol):
    """How one kind of device rings."""

    def capturing(self) -> bool:
        """Whether the device's work is being captured in a graph now."""

    def settle(self) -> None:
        """Wait until the device has done everything, so that no graph rings any more."""

    def ring(self, rung: int, answered: int, call: int) -> None:
        """In stream order: set the word at ``answered`` to 0, write ``call`` to the word at ``rung``, and wait until
        ``answered`` is ``call``. Both are addresses of 32-bit words in pinned memory."""


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


CHANGING = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
"""The tensors of a :class:`GraphBatch`."""


class GraphCalls:
    """The host attention of one device's graphs.

    Args:
        link: to the device.
        pinning: pins memory for the device.
        cpu: the CPU for the thread that answers, or -1.
    """

    def __init__(self, link: Link, pinning: Pinning | None, bell: Bell, cpu: int = -1) -> None:
        self.link = link
        self.bell = bell
        self._pinning = pinning
        self._buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._batches: dict[str, tuple[GraphBatch, GraphBatch]] = {}
        """By block table: the last batch that was copied down, and its copy."""
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
            self._buffer("sinks", (heads,), torch.float32)
        for name in CHANGING:
            tensor: torch.Tensor = getattr(batch, name)
            self._buffer(f"{batch.table} {name}", tensor.shape, tensor.dtype)

    def bring_down(self, batch: GraphBatch) -> None:
        """Copy a batch's lengths, block tables and slots to the host. Once per step and block table."""
        copies: dict[str, Any] = {}
        for name in CHANGING:
            tensor: torch.Tensor = getattr(batch, name)
            copies[name], seen = self._buffer(f"{batch.table} {name}", tensor.shape, tensor.dtype)
            seen.copy_(tensor)
        self._batches[batch.table] = batch, replace(batch, **copies)

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
        found, down = self._batches[batch.table]
        assert found is batch, f"block table {batch.table} was copied down for another batch"
        tokens, parts = len(query), (query, key, value)
        widths = [part.shape[1] * part.shape[2] for part in parts]
        rows, rows_seen = self._buffer("rows", (tokens, sum(widths)), query.dtype)
        torch.cat([part.flatten(1) for part in parts], dim=1, out=rows_seen)
        query_there, key_there, value_there = (
            columns.unflatten(1, part.shape[1:]) for columns, part in zip(rows.split(widths, dim=1), parts, strict=True)
        )
        out, out_seen = self._buffer("out", query.shape, query.dtype)
        sinks = self._on_device(layer, batch, query, key, value).sinks
        if sinks is not None:  # a weight, which may be loaded again
            sinks_there, sinks_seen = self._buffer("sinks", sinks.shape, torch.float32)
            sinks_seen.copy_(sinks)
            sinks = sinks_there
        problem = replace(
            self._layers[layer],
            query=query_there,
            sinks=sinks,
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
        attention, *_ = cpu_kernels.attention_arguments(problem, out, None, False)
        call = self.thread.add(write, attention, problem, down, rows, out)
        self.bell.ring(self.thread.rung, self.thread.answered, call)
        output[:tokens].copy_(out_seen)

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
