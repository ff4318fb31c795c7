"""One step of a host layer: the device and the CPU share the attention over a KV cache in host memory.

The CPU computes requests with at most ``step.MAX_CPU_TOKENS`` new tokens (decoding, speculation) and reads their pages
at the speed of host memory. Optionally, the device reads a part of them over the link at the same time. The device
computes requests with more new tokens (prefill): their new keys and values are written to the host during the
computation, and the context before them is prefetched block by block. Partial results are merged by log-sum-exp, so
that every result equals attention over all tokens (the paper's CPU-GPU cooperation, arXiv 2410.16663 section 4.4).

If there is room for copies of blocks on the device (``resident.py``), the device attends to these, and the CPU and the
link only to what comes after them. A step whose contexts all lie on the device does not wait for the host.

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
from fastattention_vllm.attention.kernels import StoresKv
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.placement import stored_rows
from fastattention_vllm.placement.counters import Counters
from fastattention_vllm.placement.link import Link
from fastattention_vllm.placement.prefetch import KvRange, Prefetcher, Visit
from fastattention_vllm.placement.resident import ResidentBlocks
from fastattention_vllm.placement.step import CpuRequests, DeviceRequest, Step
from fastattention_vllm.placement.stored_rows import Rows
from fastattention_vllm.placement.stream_split import StreamSplit

MIN_STREAMED_BYTES = 1 << 20
"""Bytes. A smaller copy is not worth its cost."""


class Device(StoresKv, Protocol):
    """The interface of the device's attention kernels, which ``attention.cpu`` and ``attention.flash`` implement."""

    def run(
        self, problem: AttentionProblem, *, return_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


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


class Piece(NamedTuple):
    """A part of a context that is on the device."""

    begin: int
    end: int
    """The tokens of the context from ``begin`` up to, but not including, ``end``."""
    blocks: torch.Tensor
    """Blocks like those of a cache."""
    table: torch.Tensor
    """``[1, >= number of blocks]`` int32: where in ``blocks`` the context's blocks are."""


@dataclass(frozen=True)
class ResidentStep:
    """The blocks of one step of which the device has copies (``resident.py``), for all layers that have copies."""

    slots: torch.Tensor
    """Where the copy of each new token belongs, where the device's ``write_kv`` needs it."""
    device_rows: tuple[torch.Tensor, ...]
    """For each of ``Step.device_requests``, the rows of the first blocks of its context: ``[1, count]`` int32."""
    cpu_blocks: tuple[int, ...]
    """For each of ``Step.cpu_requests``, how many blocks at the beginning of its context are on the device."""
    seq_lens: torch.Tensor
    """int32 on the host: for each token of ``Step.cpu_requests``, the keys on the device that it sees."""
    query_start_loc: torch.Tensor
    """For these tokens, each of which is a sequence for the device."""
    block_table: torch.Tensor
    """Rows, on the device."""
    whole: bool
    """Whether nothing of ``Step.cpu_requests`` is left for the CPU."""


@dataclass(frozen=True)
class SplitKey:
    """The properties that determine how a step is split. Layers with the same properties share a split."""

    window: int | None
    stream_split: StreamSplit
    merges: bool
    blocks_per_buffer: int
    block_bytes: int
    has_copies: bool


@dataclass(frozen=True)
class StepSplit:
    """How the contexts of one step are split for layers with the same key."""

    fetched: tuple[tuple[KvRange, ...], ...]
    """For each request of ``Step.device_requests``, its context within the window, after what lies on the device."""
    streamed: tuple[tuple[KvRange, ...], ...]
    """For each request of ``Step.cpu_requests``, what the device reads over the link."""
    seq_lens: torch.Tensor | None
    block_table: torch.Tensor | None
    """The rest, which the CPU computes, in the form of ``CpuRequests``."""
    cpu_bytes: int
    """Bytes of keys and values that the CPU reads."""
    fetched_bytes: int
    """Bytes of the blocks of ``fetched``."""
    streamed_bytes: int
    """Bytes of the blocks of ``streamed``."""
    resident_bytes: int = 0
    """Bytes of keys and values that lie on the device, too, and are read there."""


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
    resident: ResidentBlocks | None = None
    """Which blocks also lie on the device, if the device has memory for copies."""
    resident_steps: WeakKeyDictionary[Step, ResidentStep] = field(init=False, default_factory=WeakKeyDictionary)
    """Of every step that is still in use."""

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

    def resident_step(self, step: Step, block_size: int) -> ResidentStep:
        """What of ``step`` lies on the device. The first call gives room to blocks that the step begins."""
        found = self.resident_steps.get(step)
        if found is None:
            assert self.resident is not None
            found = self.resident_steps[step] = _on_device(step, self.resident, block_size, self.link)
        return found

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
        copies: ``[num_rows, num_kv_heads, block_size, K | V]`` on the device: room for copies of blocks, or None. Not
            with a window, whose blocks do not stay, and not with 8 bits.
    """

    def __init__(
        self,
        group: HostLayerGroup,
        layer: Layer,
        cache: torch.Tensor,
        window: int | None = None,
        copies: torch.Tensor | None = None,
    ) -> None:
        self.group = group
        self.layer = layer
        self.cache = cache
        self.window = window
        self.pages = stored_rows.pages_of(cache)
        self.device_pages = stored_rows.pages_of(group.link.visible(cache))
        self.rounds = cache.dtype.itemsize == 1
        """Whether the cache has 8 bits. The device rounds and widens its rows then."""
        assert copies is None or (window is None and not self.rounds and copies.shape[1:] == cache.shape[1:])
        self.copies = copies
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
        resident = self._resident(step)
        if resident is not None:
            self._write_copies(resident, key, value)
        needs_cpu = step.cpu_requests is not None and not (resident and resident.whole)
        write_all = step.cpu_requests is not None and not needs_cpu
        new_rows = self._write_through(step, key, value, write_all) if step.device_requests or write_all else []
        if not step.independent:
            if step.cpu_requests and needs_cpu:  # the device may need to read these keys and values, too
                rows = self._on_device(step.cpu_requests)
                self._store(step.cpu_requests, *link.arrive(link.start_to_host(key[rows], value[rows])))
            prefetcher.fetch_now([self.written])
        split = self._split_of(step)
        self._count(split)
        for number, (request, rows_of) in enumerate(zip(step.device_requests, new_rows, strict=True)):
            rows_there = resident.device_rows[number] if resident else None
            context = self._context(step, request, split.fetched[number], rows_there)
            self._attend_on_device(request, context, query, rows_of, output)
        if step.cpu_requests and not needs_cpu:
            assert resident is not None
            rows = self._on_device(step.cpu_requests)
            output[rows] = self._attend_to_copies(resident, query[rows])[0].to(output.dtype)
        elif step.cpu_requests:
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
        self._attend_on_device(request, [Piece(0, tokens, staged, self.group.prefetcher.table)], query, rows, output)

    def ranges(self, step: Step) -> list[KvRange]:
        """The ranges that the device reads in ``step``, in the order in which it uses them."""
        split = self._split_of(step)
        return [kv_range for ranges in (*split.fetched, *split.streamed) for kv_range in ranges]

    def _split_of(self, step: Step) -> StepSplit:
        blocks_per_buffer, block_bytes = self.group.prefetcher.blocks_per_buffer(self.cache), self.cache[:1].nbytes
        merges, copies = self.layer.merges(), self._resident(step) is not None
        key = SplitKey(self.window, self.group.stream_split, merges, blocks_per_buffer, block_bytes, copies)
        found = self.group.splits.setdefault(step, {})
        if key not in found:
            found[key] = self._split_contexts(step, block_bytes)
        return found[key]

    def _resident(self, step: Step) -> ResidentStep | None:
        """What of ``step`` lies on the device, or None if this layer has no copies."""
        return None if self.copies is None else self.group.resident_step(step, self.block_size)

    def _split_contexts(self, step: Step, block_bytes: int) -> StepSplit:
        resident, size = self._resident(step), self.block_size
        kept = [rows.shape[1] for rows in resident.device_rows] if resident else [0] * len(step.device_requests)
        fetched = tuple(
            self._ranges(request.blocks, request.context, count)
            for request, count in zip(step.device_requests, kept, strict=True)
        )
        contexts = zip(step.device_requests, kept, strict=True)
        resident_tokens = sum(min(count * size, request.context) for request, count in contexts)
        fetched_bytes = _blocks_in(fetched) * block_bytes
        requests = step.cpu_requests
        if requests is None:
            there = resident_tokens * block_bytes // size
            return StepSplit(fetched, (), None, None, 0, fetched_bytes, 0, there)
        first = resident.cpu_blocks if resident else (0,) * len(requests.contexts)
        counts = self._streamed_blocks(requests, first)
        blocks = [
            requests.block_table[index, begin : begin + count].long()
            for index, (begin, count) in enumerate(zip(first, counts, strict=True))
        ]
        streamed = tuple(self._ranges(ids, len(ids) * size) for ids in blocks)
        left_out = [begin + count for begin, count in zip(first, counts, strict=True)]
        seq_lens = (requests.seq_lens - torch.tensor(left_out, dtype=torch.int32) * size).clamp(min=0)
        visible = seq_lens
        if self.window is not None:
            visible = torch.minimum(seq_lens, self.window + requests.query_start_loc.diff())
        on_device = torch.minimum(requests.seq_lens, torch.tensor(first, dtype=torch.int32) * size)
        return StepSplit(
            fetched,
            streamed,
            seq_lens,
            _without_first(requests.block_table, left_out),
            int(visible.sum()) * block_bytes // size,
            fetched_bytes,
            _blocks_in(streamed) * block_bytes,
            (resident_tokens + int(on_device.sum())) * block_bytes // size,
        )

    def _count(self, split: StepSplit) -> None:
        counters = self.group.counters
        counters.cpu_bytes += split.cpu_bytes
        counters.prefill_streamed_bytes += split.fetched_bytes
        counters.decode_streamed_bytes += split.streamed_bytes
        counters.resident_bytes += split.resident_bytes

    def _ranges(self, blocks: torch.Tensor, tokens: int, first: int = 0) -> tuple[KvRange, ...]:
        """The ranges of a context of ``tokens`` tokens in ``blocks``, from block ``first`` on, without the blocks that
        have left the window."""
        if self.window is not None:
            first = max(0, tokens - self.window) // self.block_size
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

    def _write_copies(self, resident: ResidentStep, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the new rows of all requests in the copies, before anything reads them there."""
        assert self.copies is not None
        pages, new = stored_rows.pages_of(self.copies), len(resident.slots)
        self.group.device.write_kv(key[:new], value[:new], pages.key, pages.value, resident.slots, *self.layer.scales())

    def _write_through(
        self, step: Step, key: torch.Tensor, value: torch.Tensor, write_all: bool = False
    ) -> list[NewRows]:
        """Start to store the new rows of device requests, and return them.

        ``write_all``: store those of all requests. Never with 8 bits, because layers that round have no copies.
        """
        found = [self._new_rows(request, key, value) for request in step.device_requests]
        pages, scales, slots = self.device_pages, self.layer.scales(), step.batch.device_slots
        with self.group.link.writing():
            for request, new in zip(step.device_requests, found, strict=True):
                if new.stored is not None:
                    self._write_rounded(new.stored, step.batch.slot_mapping[request.rows], slots[request.rows])
            every = [slice(0, len(slots))] if write_all else [request.rows for request in step.device_requests]
            for rows in [] if self.rounds else every:
                self.group.device.write_kv(key[rows], value[rows], pages.key, pages.value, slots[rows], *scales)
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
        context: Iterable[Piece],
        query: torch.Tensor,
        new_rows: NewRows,
        output: torch.Tensor,
    ) -> None:
        """Attention among the new tokens, then over the ``context``, piece by piece."""
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
        for piece in context:
            if total is None:
                total = partial.float()
            seeing, reach = new, -1
            if self.window is not None:
                # Of the rows that see any key of this piece, the last one sees only the piece's last key.
                seeing = min(new, self.window + piece.end - request.context)
                reach = self.window + piece.end - request.context - seeing
            part, part_lse = self._attend_to_piece(rows[:seeing], piece, (reach, -1))
            merge(total[:seeing], lse[:seeing], part, part_lse)
        output[request.rows] = partial if total is None else total

    def _context(
        self, step: Step, request: DeviceRequest, ranges: Iterable[KvRange], rows: torch.Tensor | None
    ) -> Iterator[Piece]:
        """The context of a device request: its blocks that lie on the device (``rows``), then what is fetched."""
        if rows is not None and rows.shape[1]:
            assert self.copies is not None
            yield Piece(0, min(rows.shape[1] * self.block_size, request.context), self.copies, rows)
        yield from self._staged(step, ranges)

    def _staged(self, step: Step, ranges: Iterable[KvRange]) -> Iterator[Piece]:
        prefetcher = self.group.prefetcher
        for kv_range, blocks in prefetcher.staged(self, step, ranges):
            yield Piece(kv_range.begin, kv_range.end, blocks, prefetcher.table)

    def _attend_to_piece(
        self, query: torch.Tensor, piece: Piece, window: tuple[int, int] = (-1, -1)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention without a causal mask over ``piece``."""
        tokens = piece.end - piece.begin
        blocks = -(-tokens // self.block_size)
        pages = stored_rows.pages_of(piece.blocks)
        key, value = pages.key, pages.value
        if self.rounds:
            key, value = pages.first(blocks).widened(query.dtype, self.layer.scales())
        problem = self.layer.problem(
            query=query,
            key=key,
            value=value,
            query_start_loc=_int32(0, query.shape[0]),
            seq_lens=_int32(tokens),
            block_table=piece.table[:, :blocks],
            causal=False,
            window=window,
            sinks=None,  # counted once, with the new tokens or by the CPU
        )
        return _with_lse(self.group.device.run(problem, return_lse=True))

    def _attend_to_copies(
        self, resident: ResidentStep, query: torch.Tensor, **parts: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the CPU requests' tokens over what lies on the device."""
        assert self.copies is not None
        pages = stored_rows.pages_of(self.copies)
        problem = self.layer.problem(
            query=query,
            key=pages.key,
            value=pages.value,
            query_start_loc=resident.query_start_loc,
            seq_lens=resident.seq_lens,
            block_table=resident.block_table,
            causal=True,
            **parts,
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

        The device's part is what lies there, and what it reads over the link.

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
        resident = self._resident(step)
        if resident is not None and not any(resident.cpu_blocks):
            resident = None
        if resident is None and not any(split.streamed):
            began = time.perf_counter()
            cpu_kernels.run(problem, out=out)
            self.group.counters.cpu_seconds += time.perf_counter() - began
            output[rows] = link.to_device(out)
            self.group.counters.device_wait_seconds += time.perf_counter() - arrived
            return
        lse = link.host_buffer("lse", query.shape[:2], torch.float32)
        with self._on_cpu(problem, out, lse):
            part, part_lse = self._attend_to_device_part(step, split, resident, query)
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

    def _attend_to_device_part(
        self, step: Step, split: StepSplit, resident: ResidentStep | None, query: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 ``out`` and ``lse`` of the CPU requests over the device's part; 0 and -inf for requests without one."""
        assert step.cpu_requests is not None
        if resident is not None:
            part, lse = self._attend_to_copies(resident, query, sinks=None)  # the CPU counts them
            total = part.float()
        else:
            total = torch.zeros_like(query, dtype=torch.float32)
            lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
        starts = step.cpu_requests.query_start_loc.tolist()
        for index, ranges in enumerate(split.streamed):
            own = slice(starts[index], starts[index + 1])
            for piece in self._staged(step, ranges):
                merge(total[own], lse[own], *self._attend_to_piece(query[own], piece))
        return total, lse

    def _streamed_blocks(self, requests: CpuRequests, first: Sequence[int]) -> list[int]:
        """Number of blocks, from block ``first`` of each context on, that the device reads over the link.

        None with a window, which is short.
        """
        block = self.cache[:1].nbytes
        contexts = [
            max(0, context - begin * self.block_size) for context, begin in zip(requests.contexts, first, strict=True)
        ]
        drafts = int(requests.query_start_loc[-1]) > len(contexts)
        fraction = self.group.stream_split.of(sum(contexts) * block // self.block_size, drafts=drafts)
        if fraction == 0 or self.window is not None or not self.layer.merges():
            return [0] * len(contexts)
        counts = [int(fraction * context) // self.block_size for context in contexts]
        return [count if count * block >= MIN_STREAMED_BYTES else 0 for count in counts]


def _on_device(step: Step, blocks: ResidentBlocks, block_size: int, link: Link) -> ResidentStep:
    found = blocks.admit(step.batch, block_size)
    device_rows = tuple(
        link.to_device(found.rows[request.number, None, : min(found.counts[request.number], len(request.blocks))])
        for request in step.device_requests
    )
    slots = link.to_device(found.slots)
    requests = step.cpu_requests
    if requests is None:
        none = torch.zeros(0, dtype=torch.int32)
        return ResidentStep(slots, device_rows, (), none, _int32(0), none, whole=False)
    # Without a causal mask, a token also sees keys after it. The CPU then attends to everything.
    counts = tuple(found.counts[number] * requests.causal for number in requests.numbers)
    new = requests.query_start_loc.diff().long()
    of_token = torch.arange(len(new)).repeat_interleave(new)
    left = requests.query_start_loc[1:].long()[of_token] - torch.arange(len(of_token))  # tokens from here to the end
    seen = torch.minimum(requests.seq_lens[of_token] - left + 1, torch.tensor(counts)[of_token] * block_size)
    return ResidentStep(
        slots,
        device_rows,
        counts,
        seen.int(),
        torch.arange(len(of_token) + 1, dtype=torch.int32),
        link.to_device(found.rows[list(requests.numbers)][of_token]),
        whole=bool((torch.tensor(counts) * block_size >= requests.seq_lens).all()),
    )


def _blocks_in(ranges: Iterable[Iterable[KvRange]]) -> int:
    return sum(len(one.blocks) for some in ranges for one in some)


def merge(total: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge ``part`` and ``part_lse`` into ``total`` and ``lse``, in place.

    ``total``: fp32 ``[tokens, heads, head_size]``; ``lse``: fp32 ``[tokens, heads]``; it or ``part_lse`` may be -inf.
    With w = e^part_lse / (e^lse + e^part_lse): total += w * (part - total). If both are -inf, nothing changes.
    """
    # A row of padding has no keys in either part, and -inf - -inf would be NaN.
    weight = torch.sigmoid(part_lse - lse.clamp(min=torch.finfo(torch.float32).min))
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
