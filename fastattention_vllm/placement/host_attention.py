"""One step of a host layer: the device and the CPU share the attention over a KV cache in host memory.

The CPU computes requests with at most ``step.MAX_CPU_TOKENS`` new tokens (decoding, speculation) and reads their pages
at the speed of host memory. Optionally, the device reads a part of them over the link at the same time. The device
computes requests with more new tokens (prefill): their new keys and values are written to the host during the
computation, and the context before them is prefetched block by block. Partial results are merged by log-sum-exp, so
that every result equals attention over all tokens (the paper's CPU-GPU cooperation, arXiv 2410.16663 section 4.4).

The same code runs if the "device" is the host itself (``LocalLink``); then nothing overlaps.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch

from fastattention_vllm.attention.cpu import kernels as cpu_kernels
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.placement import stored_rows
from fastattention_vllm.placement.counters import Counters
from fastattention_vllm.placement.link import Link
from fastattention_vllm.placement.prefetch import KvRange, Prefetcher, Visit
from fastattention_vllm.placement.step import CpuRequests, DeviceRequest, Step
from fastattention_vllm.placement.stored_rows import Rows
from fastattention_vllm.placement.stream_split import StreamSplit

MIN_STREAMED_BYTES = 1 << 20
"""Bytes. A smaller copy is not worth its cost."""


class Device(Protocol):
    """The interface of the device's attention kernels, which ``attention.cpu`` and ``attention.flash`` implement."""

    def run(
        self, problem: AttentionProblem, *, return_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

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


class Layer(Protocol):
    """The properties of a model's layer, without tensors."""

    @property
    def num_heads(self) -> int: ...

    def problem(self, **parts: Any) -> AttentionProblem: ...

    def scales(self) -> tuple[float, float]:
        """The scales by which the keys and values of an fp8 cache were divided."""

    def merges(self) -> bool:
        """Whether attention over parts of the keys can be merged into the exact result."""


class NewRows(NamedTuple):
    """The new rows of one device request."""

    key: torch.Tensor
    """``[num_tokens, num_kv_heads, head_size]``."""
    value: torch.Tensor
    stored: Rows | None
    """As an 8-bit cache stores them. They must live until they are written."""


@dataclass(frozen=True)
class SplitKey:
    """The properties that determine how a step is split. Layers with the same properties share a split."""

    window: int | None
    stream_split: StreamSplit
    merges: bool
    blocks_per_buffer: int
    block_bytes: int


@dataclass(frozen=True)
class StepSplit:
    """How the contexts of one step are split for layers with the same key."""

    fetched: tuple[tuple[KvRange, ...], ...]
    """For each request of ``Step.device_requests``, its whole context within the window."""
    streamed: tuple[tuple[KvRange, ...], ...]
    """For each request of ``Step.cpu_requests``, the device's share."""
    seq_lens: torch.Tensor | None
    block_table: torch.Tensor | None
    """The rest, which the CPU computes, in the form of ``CpuRequests``."""
    cpu_bytes: int
    """Bytes of keys and values that the CPU reads."""
    fetched_bytes: int
    """Bytes of the blocks of ``fetched``."""
    streamed_bytes: int
    """Bytes of the blocks of ``streamed``."""


@dataclass
class HostLayerGroup:
    """The state that all host layers of one device share."""

    link: Link
    device: Device
    layers: list[HostAttention] = field(default_factory=list)
    """In the model's order, across all block tables."""
    stream_split: StreamSplit = field(default_factory=lambda: StreamSplit(0.0))
    counters: Counters = field(default_factory=Counters)
    prefetcher: Prefetcher = field(init=False)
    splits: WeakKeyDictionary[Step, dict[SplitKey, StepSplit]] = field(init=False, default_factory=WeakKeyDictionary)
    """The splits of every step that is still in use. The first layer with a key computes the split."""

    def __post_init__(self) -> None:
        self.prefetcher = Prefetcher(self.link)

    @functools.cached_property
    def saturated(self) -> torch.Tensor:
        """Two int64 in host memory, which CPU and device add to: numbers that an fp8 cache could not hold."""
        return self.link.host_buffer("saturated", (2,), torch.int64).zero_()

    def total(self) -> Counters:
        """What the layers have done outside of graphs, and what their caches could not hold at all."""
        found = int(self.saturated.sum()) if "saturated" in self.__dict__ else 0
        return self.counters + Counters(saturated_numbers=found)

    def upcoming(self, layer: HostAttention, step: Step) -> list[Visit]:
        """The rest of a pass from ``layer`` on, if all layers have the same step."""
        return [Visit(following, step) for following in self.layers[self.layers.index(layer) :]]


class HostAttention:
    """One host layer.

    Args:
        group: the shared state of the device's host layers. Layers are created in the model's order.
        layer: provides this layer's scale, window and so on for every problem, because weights may be reloaded.
        cache: ``[num_blocks, num_kv_heads, block_size, K | V]`` in host memory, in the shape of
            :func:`stored_rows.page_shape`.
        window: number of keys before itself that a token sees; None for all.
    """

    def __init__(self, group: HostLayerGroup, layer: Layer, cache: torch.Tensor, window: int | None = None) -> None:
        self.group = group
        self.layer = layer
        self.cache = cache
        self.window = window
        self.pages = stored_rows.pages_of(cache)
        self.device_pages = stored_rows.pages_of(group.link.visible(cache))
        self.rounds = cache.dtype.itemsize == 1
        """Whether the cache has 8 bits. The device rounds and widens its rows then."""
        self.counts_saturated = self.rounds and not stored_rows.has_factors(cache.dtype)
        if self.counts_saturated:
            self.saturated_on_device = group.link.visible(group.saturated)[1:]
        self.written: Any = group.link.mark()
        """The event after which all writes to the cache from the device are done."""
        group.prefetcher.reserve(cache)
        group.layers.append(self)

    @property
    def block_size(self) -> int:
        return self.cache.shape[2]

    def in_cache(self) -> dict[str, Any]:
        """The parts of a problem for the CPU that say what the cache holds."""
        parts: dict[str, Any] = {"key": self.pages.key, "value": self.pages.value}
        if self.rounds:
            parts["key_scale"], parts["value_scale"] = self.layer.scales()
        if self.pages.factors is not None:
            parts["key_factors"], parts["value_factors"] = self.pages.factors
        return parts

    def stores(self) -> dict[str, Any]:
        """The arguments of ``write_kv`` on the CPU that say how the cache stores rows."""
        key_scale, value_scale = self.layer.scales()
        return {
            "key_scale": key_scale,
            "value_scale": value_scale,
            "factors": self.pages.factors,
            "saturated": self.group.saturated[:1] if self.counts_saturated else None,
        }

    def attend(
        self,
        step: Step,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        upcoming: Callable[[], Iterable[Visit]] | None = None,
    ) -> None:
        """Store this step's ``key`` and ``value``, and compute attention of ``query`` into ``output``.

        All tensors are on the device: ``[>= num_tokens, heads, head_size]``. Padding rows are not changed.

        ``upcoming`` returns the layers and steps of the rest of the forward pass, beginning with this layer. None: all
        following layers, with ``step``.
        """
        link, prefetcher = self.group.link, self.group.prefetcher
        prefetcher.begin(self, step, upcoming or (lambda: self.group.upcoming(self, step)))
        written_before = self.written
        new_rows = self._write_through(step, key, value) if step.device_requests else []
        if not step.independent:
            if step.cpu_requests:  # the device may need to read these keys and values, too
                rows = self._on_device(step.cpu_requests)
                self._store(step.cpu_requests, *link.arrive(link.start_to_host(key[rows], value[rows])))
            prefetcher.fetch_now([self.written])
        split = self._split_of(step)
        self._count(split)
        for request, rows_of, ranges in zip(step.device_requests, new_rows, split.fetched, strict=True):
            staged = prefetcher.staged(self, step, ranges)
            self._attend_on_device(request, staged, query, rows_of, output)
        if step.cpu_requests:
            # A request may begin with blocks that another request writes in the same step.
            link.wait_on_host(written_before if step.independent else self.written)
            self._attend_together(step, split, query, key, value, output, store=step.independent)
        link.wait(self.written)  # after this layer, its keys and values may be overwritten
        prefetcher.end()

    def rehearse(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> None:
        """Allocate and release as much device memory as the longest step with this number of tokens needs.

        It computes one request with a context that fills a staging buffer, whatever its content is. Nothing is written
        to the cache.
        """
        tokens = self.group.prefetcher.blocks_per_buffer(self.cache) * self.block_size
        blocks = torch.empty(0, dtype=torch.int64)
        request = DeviceRequest(slice(0, len(query)), tokens, blocks)
        staged = self.group.prefetcher.view(0, self.cache)
        rows = self._new_rows(request, key, value)
        self._attend_on_device(request, [(KvRange(0, tokens, blocks), staged)], query, rows, output)

    def ranges(self, step: Step) -> list[KvRange]:
        """The ranges that the device reads in ``step``, in the order in which it uses them."""
        split = self._split_of(step)
        return [kv_range for ranges in (*split.fetched, *split.streamed) for kv_range in ranges]

    def _split_of(self, step: Step) -> StepSplit:
        blocks_per_buffer, block_bytes = self.group.prefetcher.blocks_per_buffer(self.cache), self.cache[:1].nbytes
        key = SplitKey(self.window, self.group.stream_split, self.layer.merges(), blocks_per_buffer, block_bytes)
        found = self.group.splits.setdefault(step, {})
        if key not in found:
            found[key] = self._split_contexts(step, block_bytes)
        return found[key]

    def _split_contexts(self, step: Step, block_bytes: int) -> StepSplit:
        fetched = tuple(self._ranges(request.blocks, request.context) for request in step.device_requests)
        fetched_bytes = _blocks_in(fetched) * block_bytes
        requests = step.cpu_requests
        if requests is None:
            return StepSplit(fetched, (), None, None, 0, fetched_bytes, 0)
        counts = self._streamed_blocks(requests)
        blocks = [requests.block_table[index, :count].long() for index, count in enumerate(counts)]
        streamed = tuple(self._ranges(ids, len(ids) * self.block_size) for ids in blocks)
        seq_lens = requests.seq_lens - torch.tensor(counts, dtype=torch.int32) * self.block_size
        visible = seq_lens
        if self.window is not None:
            visible = torch.minimum(seq_lens, self.window + requests.query_start_loc.diff())
        return StepSplit(
            fetched,
            streamed,
            seq_lens,
            _without_first(requests.block_table, counts),
            int(visible.sum()) * block_bytes // self.block_size,
            fetched_bytes,
            _blocks_in(streamed) * block_bytes,
        )

    def _count(self, split: StepSplit) -> None:
        counters = self.group.counters
        counters.cpu_bytes += split.cpu_bytes
        counters.prefill_streamed_bytes += split.fetched_bytes
        counters.decode_streamed_bytes += split.streamed_bytes

    def _ranges(self, blocks: torch.Tensor, tokens: int) -> tuple[KvRange, ...]:
        """The ranges of a context of ``tokens`` tokens in ``blocks``, without the blocks that have left the window."""
        first = 0 if self.window is None else max(0, tokens - self.window) // self.block_size
        max_blocks = self.group.prefetcher.blocks_per_buffer(self.cache)
        last = -(-tokens // self.block_size)
        size = self.block_size
        return tuple(
            KvRange(begin * size, min((begin + max_blocks) * size, tokens), blocks[begin : begin + max_blocks])
            for begin in range(first, last, max_blocks)
        )

    def _new_rows(self, request: DeviceRequest, key: torch.Tensor, value: torch.Tensor) -> NewRows:
        """A device request's new rows, in the precision that the cache would return."""
        key, value = key[request.rows], value[request.rows]
        if not self.rounds:
            return NewRows(key.to(self.cache.dtype), value.to(self.cache.dtype), None)
        scales = self.layer.scales()
        rows = stored_rows.rounded(key, value, self.cache.dtype, scales)
        return NewRows(*rows.widened(key.dtype, scales), rows)

    def _write_through(self, step: Step, key: torch.Tensor, value: torch.Tensor) -> list[NewRows]:
        """Start to store the new rows of device requests, and return them."""
        found = [self._new_rows(request, key, value) for request in step.device_requests]
        pages, scales = self.device_pages, self.layer.scales()
        with self.group.link.writing():
            for request, new in zip(step.device_requests, found, strict=True):
                slots = step.batch.device_slots[request.rows]
                if new.stored is not None:
                    self._write_rounded(new.stored, step.batch.slot_mapping[request.rows], slots)
                    continue
                self.group.device.write_kv(
                    key[request.rows], value[request.rows], pages.key, pages.value, slots, *scales
                )
            self.written = self.group.link.written()
        return found

    def _write_rounded(self, rows: Rows, slots: torch.Tensor, device_slots: torch.Tensor) -> None:
        """``slots`` are on the host, and ``device_slots`` the same ones on the device."""
        if bool((slots < 0).any()):  # these tokens are left out
            kept = self.group.link.to_device((slots >= 0).nonzero().flatten())
            rows, device_slots = rows[kept], device_slots[kept]
        self.device_pages.write(rows, device_slots)
        if rows.saturated is not None:
            self.saturated_on_device += rows.saturated

    def _attend_on_device(
        self,
        request: DeviceRequest,
        context: Iterable[tuple[KvRange, torch.Tensor]],
        query: torch.Tensor,
        new_rows: NewRows,
        output: torch.Tensor,
    ) -> None:
        """Attention among the new tokens, then over the ``context``, range by range, with each one's device blocks."""
        device, new = self.group.device, request.rows.stop - request.rows.start
        rows, none_before = query[request.rows], torch.zeros(1, dtype=torch.int32)
        problem = self.layer.problem(
            query=rows,
            key=new_rows.key,
            value=new_rows.value,
            query_start_loc=_int32(0, new),
            seq_lens=_int32(new),
            kv_start_loc=none_before,
            causal=True,
        )
        partial, lse = _with_lse(device.run(problem, return_lse=True))
        total: torch.Tensor | None = None
        for kv_range, blocks in context:
            if total is None:
                total = partial.float()
            seeing, reach = new, -1
            if self.window is not None:
                # Of the rows that see any key of this range, the last one sees only the range's last key.
                seeing = min(new, self.window + kv_range.end - request.context)
                reach = self.window + kv_range.end - request.context - seeing
            part, part_lse = self._attend_to_range(rows[:seeing], kv_range, blocks, (reach, -1))
            merge(total[:seeing], lse[:seeing], part, part_lse)
        output[request.rows] = partial if total is None else total

    def _attend_to_range(
        self, query: torch.Tensor, kv_range: KvRange, staged: torch.Tensor, window: tuple[int, int] = (-1, -1)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention without a causal mask over ``kv_range``, whose blocks are ``staged`` on the device."""
        tokens = kv_range.end - kv_range.begin
        blocks = -(-tokens // self.block_size)
        pages = stored_rows.pages_of(staged)
        key, value = pages.key, pages.value
        if self.rounds:
            key, value = pages.first(blocks).widened(query.dtype, self.layer.scales())
        problem = self.layer.problem(
            query=query,
            key=key,
            value=value,
            query_start_loc=_int32(0, query.shape[0]),
            seq_lens=_int32(tokens),
            block_table=self.group.prefetcher.table[:, :blocks],
            causal=False,
            window=window,
            sinks=None,  # counted once, with the new tokens or by the CPU
        )
        return _with_lse(self.group.device.run(problem, return_lse=True))

    def _on_device(self, requests: CpuRequests) -> slice | torch.Tensor:
        return requests.rows if isinstance(requests.rows, slice) else self.group.link.to_device(requests.rows)

    def _store(self, requests: CpuRequests, key: torch.Tensor, value: torch.Tensor) -> None:
        cpu_kernels.write_kv(key, value, self.pages.key, self.pages.value, requests.slot_mapping, **self.stores())

    def _attend_together(
        self,
        step: Step,
        split: StepSplit,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        *,
        store: bool,
    ) -> None:
        """The device computes the first part of some contexts, and the CPU computes everything else.

        ``store``: whether keys and values are yet to be stored in the cache.
        """
        requests = step.cpu_requests
        assert requests is not None
        link, rows = self.group.link, self._on_device(requests)
        query = query[rows]
        query_there, key_there, value_there = link.arrive(link.start_to_host(query, key[rows], value[rows]))
        arrived = time.perf_counter()
        if store:
            self._store(requests, key_there, value_there)
        problem = self.layer.problem(
            query=query_there,
            **self.in_cache(),
            query_start_loc=requests.query_start_loc,
            seq_lens=split.seq_lens,
            block_table=split.block_table,
            causal=requests.causal,
        )
        out = link.host_buffer("out", query.shape, query.dtype)
        if not any(split.streamed):
            began = time.perf_counter()
            cpu_kernels.run(problem, out=out)
            self.group.counters.cpu_seconds += time.perf_counter() - began
            output[rows] = link.to_device(out)
            self.group.counters.device_wait_seconds += time.perf_counter() - arrived
            return
        lse = link.host_buffer("lse", query.shape[:2], torch.float32)
        with self._on_cpu(problem, out, lse):
            part, part_lse = self._attend_to_streamed(step, split, query)
        total, total_lse = link.to_device(out).float(), link.to_device(lse)
        merge(total, total_lse, part, part_lse)
        output[rows] = total.to(output.dtype)
        self.group.counters.device_wait_seconds += time.perf_counter() - arrived

    @contextmanager
    def _on_cpu(self, problem: AttentionProblem, out: torch.Tensor, lse: torch.Tensor) -> Iterator[None]:
        """Compute ``problem`` on the CPU while the body launches the device's work, which takes a while."""
        began = time.perf_counter()
        if not self.group.link.beside:
            cpu_kernels.run(problem, out=out, lse=lse)
            self.group.counters.cpu_seconds += time.perf_counter() - began
            yield
            return
        running = cpu_kernels.start(problem, out, lse)
        try:
            yield
        finally:
            running.finish()
            self.group.counters.cpu_seconds += time.perf_counter() - began

    def _attend_to_streamed(
        self, step: Step, split: StepSplit, query: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 ``out`` and ``lse`` of the CPU requests over the device's part; 0 and -inf for requests without one."""
        assert step.cpu_requests is not None
        total = torch.zeros_like(query, dtype=torch.float32)
        lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
        starts = step.cpu_requests.query_start_loc.tolist()
        for index, ranges in enumerate(split.streamed):
            own = slice(starts[index], starts[index + 1])
            for kv_range, blocks in self.group.prefetcher.staged(self, step, ranges):
                part, part_lse = self._attend_to_range(query[own], kv_range, blocks)
                if kv_range is ranges[0]:
                    total[own], lse[own] = part, part_lse
                else:
                    merge(total[own], lse[own], part, part_lse)
        return total, lse

    def _streamed_blocks(self, requests: CpuRequests) -> list[int]:
        """Number of blocks at the beginning of each context that the device reads; 0 with a window, which is short."""
        block = self.cache[:1].nbytes
        fraction = self.group.stream_split.of(sum(requests.contexts) * block // self.block_size)
        if fraction == 0 or self.window is not None or not self.layer.merges():
            return [0] * len(requests.contexts)
        counts = [int(fraction * context) // self.block_size for context in requests.contexts]
        return [count if count * block >= MIN_STREAMED_BYTES else 0 for count in counts]


def _blocks_in(ranges: Iterable[Iterable[KvRange]]) -> int:
    return sum(len(one.blocks) for some in ranges for one in some)


def merge(total: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge ``part`` and ``part_lse`` into ``total`` and ``lse``, in place.

    ``total``: fp32 ``[tokens, heads, head_size]``; ``lse``: fp32 ``[tokens, heads]``, finite; ``part_lse`` may be -inf.
    With w = e^part_lse / (e^lse + e^part_lse): total += w * (part - total).
    """
    weight = torch.sigmoid(part_lse - lse)
    total.lerp_(part.to(total.dtype), weight[..., None])
    torch.logaddexp(lse, part_lse, out=lse)


def _with_lse(result: tuple[torch.Tensor, torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = result
    assert lse is not None
    return out, lse


def _without_first(block_table: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Drop the first ``counts[i]`` blocks of row i."""
    if not any(counts):
        return block_table
    shifted = torch.zeros_like(block_table)
    for row, count in enumerate(counts):
        shifted[row, : block_table.shape[1] - count] = block_table[row, count:]
    return shifted


def _int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
