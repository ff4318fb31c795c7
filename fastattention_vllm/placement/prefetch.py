"""Brings the KV of host layers to the device ahead of its use, through two staging buffers.

A forward pass visits the host layers one after the other, each with the metadata (the step) of its batch. The
prefetcher knows the visits that are to come and fills one buffer while the other is in use. A range is handed out to
the visit it was fetched for and to no other: a pass that takes another course than expected is fetched anew, never
answered from what lies in a buffer.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch

from fastattention_vllm.placement.link import Link

STAGING_BYTES = 128 << 20
"""Size of each staging buffer, unless a block is larger. There are two per device, whatever the number of layers."""
NUM_BUFFERS = 2


class PrefetchError(RuntimeError):
    """A layer asked for host KV that was not fetched for it: a defect of this package, never an answer."""


@dataclass(frozen=True, eq=False)
class KvRange:
    """A part of a context that comes to the device in one go."""

    begin: int
    end: int
    """Tokens of the context, from ``begin`` up to ``end``."""
    blocks: torch.Tensor
    """int64, on the host."""


class Step(Protocol):
    """One batch, as the prefetcher sees it."""

    @property
    def independent(self) -> bool:
        """No request reads blocks that another request of the batch is still writing."""


class HostLayer(Protocol):
    """One host layer, as the prefetcher sees it."""

    cache: torch.Tensor
    """``[num_blocks, num_kv_heads, block_size, K | V]`` in host memory."""
    written: Any
    """The point at which all writes to ``cache`` from the device are done."""

    def ranges(self, step: Any) -> Sequence[KvRange]:
        """The ranges that the device reads in ``step``, in the order of their use."""


@dataclass(frozen=True, eq=False)
class Visit:
    """One layer's turn in a forward pass, with the step that it is given."""

    layer: HostLayer
    step: Step

    def is_of(self, layer: HostLayer, step: Step) -> bool:
        return self.layer is layer and self.step is step


@dataclass(frozen=True, eq=False)
class Fetch:
    """One range of one visit."""

    visit: Visit
    kv_range: KvRange
    after: Sequence[Any]
    """Points that must have passed before the copy begins."""


class Prefetcher:
    """The two staging buffers of a device, and what is on its way into them."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.buffers: list[torch.Tensor] = []
        """uint8, on the device."""
        self.table = torch.empty(1, 0, dtype=torch.int32)
        """Block table of a buffer: its blocks in order."""
        self.free: dict[int, Any] = {}
        """Buffers not in use, each with the point at which its last use is over."""
        self.coming: collections.deque[tuple[Fetch, int, Any]] = collections.deque()
        """Fetches under way, each with its buffer and the point at which its contents are there."""
        self.waiting: collections.deque[Fetch] = collections.deque()
        """Fetches that wait for a free buffer."""
        self.expected: collections.deque[Visit] = collections.deque()
        """Visits to come."""
        self.ahead = 0
        """How many of ``expected``, from the first on, have their fetches in ``waiting`` or ``coming``."""
        self.current: Visit | None = None
        self._pass_began: Any = None

    def reserve(self, cache: torch.Tensor) -> None:
        """Take the device memory for blocks like those of ``cache``, unless it is there already."""
        block_bytes = _block_bytes(cache)
        if not self.buffers or self.buffers[0].nbytes < block_bytes:
            assert not self.coming, "staging buffers cannot grow while they are in use"
            size = max(STAGING_BYTES, block_bytes)
            self.buffers = []  # given back before larger ones are taken
            self.buffers = [self.link.staging(size) for _ in range(NUM_BUFFERS)]
            self.free = dict.fromkeys(range(NUM_BUFFERS))
        blocks = self.blocks_per_buffer(cache)
        if self.table.shape[1] < blocks:
            self.table = torch.arange(blocks, dtype=torch.int32, device=self.buffers[0].device)[None]

    def blocks_per_buffer(self, cache: torch.Tensor) -> int:
        return self.buffers[0].nbytes // _block_bytes(cache)

    def view(self, number: int, cache: torch.Tensor) -> torch.Tensor:
        """Buffer ``number`` as blocks like those of ``cache``."""
        blocks = self.blocks_per_buffer(cache)
        return self.buffers[number][: blocks * _block_bytes(cache)].view(cache.dtype).view(blocks, *cache.shape[1:])

    def begin(self, layer: HostLayer, step: Step, upcoming: Callable[[], Iterable[Visit]]) -> None:
        """It is the turn of ``layer``, with ``step``.

        ``upcoming`` gives the rest of the pass, this visit first. It is called at the beginning of a pass, and wherever
        a pass takes another course than it said.
        """
        if self.current is not None or not self.expected or not self.expected[0].is_of(layer, step):
            self.discard()
            self.expected.extend(upcoming())
            if not self.expected or not self.expected[0].is_of(layer, step):
                raise PrefetchError("the visits of a pass do not begin with the layer whose turn it is")
            self._pass_began = self.link.mark()
            self._go_on()
        self.current = self.expected.popleft()
        self.ahead = max(0, self.ahead - 1)

    def fetch_now(self, after: Sequence[Any]) -> None:
        """Ask for the current visit's ranges, where they could not be fetched before its turn."""
        assert self.current is not None
        assert not self.waiting
        assert not self.coming
        self._ask(self.current, after)
        self._go_on()

    def staged(self, layer: HostLayer, step: Step, ranges: Iterable[KvRange]) -> Iterator[tuple[KvRange, torch.Tensor]]:
        """Each of ``ranges`` with its blocks on the device, which stay valid until the next one is asked for.

        Raises:
            PrefetchError: the next range that was fetched is not that one, of that layer and step.
        """
        for wanted in ranges:
            number, blocks = self.take(layer, step, wanted)
            yield wanted, blocks
            self.give_back(number)

    def take(self, layer: HostLayer, step: Step, wanted: KvRange) -> tuple[int, torch.Tensor]:
        """The next buffer, and its blocks, those of ``wanted`` (the device waits for them, not the caller)."""
        found = self.coming[0][0] if self.coming else None
        if found is None or not found.visit.is_of(layer, step) or found.kv_range is not wanted:
            came = "those of another layer, step or request" if found else "none"
            raise PrefetchError(
                f"tokens {wanted.begin} to {wanted.end} of a host layer were to be used on the device, and {came} came "
                "next; the answer would have been wrong."
            )
        _, number, there = self.coming.popleft()
        self.link.wait(there)
        return number, self.view(number, layer.cache)

    def give_back(self, number: int) -> None:
        """The computation so far was the last to use that buffer."""
        self.free[number] = self.link.mark()
        self._go_on()

    def end(self) -> None:
        """The current visit is over."""
        not_used = (*(fetch for fetch, _, _ in self.coming), *self.waiting)
        left = [fetch for fetch in not_used if fetch.visit is self.current]
        if left:
            raise PrefetchError(f"a host layer left {len(left)} of its ranges unused; its answer is not complete.")
        self.current = None
        self._go_on()

    def discard(self) -> None:
        """Forget what was expected, and what a pass that failed has left."""
        self.expected.clear()
        self.ahead = 0
        self.current = None
        self.waiting.clear()
        self.free |= {number: there for _, number, there in self.coming}
        self.coming.clear()
        for number in set(range(len(self.buffers))) - self.free.keys():  # was in use
            self.free[number] = self.link.mark()

    def _go_on(self) -> None:
        while self.free and (self.waiting or self._look_ahead()):
            if not self.waiting:
                continue  # that visit has nothing to fetch
            fetch = self.waiting.popleft()
            number = next(iter(self.free))
            over = self.free.pop(number)
            points = [*fetch.after, over] if over is not None else fetch.after
            cache = fetch.visit.layer.cache
            there = self.link.fetch(cache, fetch.kv_range.blocks, self.view(number, cache), points)
            self.coming.append((fetch, number, there))

    def _look_ahead(self) -> bool:
        """Ask for the next expected visit's ranges, if they may be fetched before its turn."""
        if self.ahead == len(self.expected):
            return False
        visit = self.expected[self.ahead]
        # What an unfinished visit to the same layer still writes may belong to this one's context.
        unfinished = [self.current, *islice(self.expected, self.ahead)]
        if not visit.step.independent or any(other and other.layer is visit.layer for other in unfinished):
            return False
        self.ahead += 1
        self._ask(visit, [self._pass_began, visit.layer.written])
        return True

    def _ask(self, visit: Visit, after: Sequence[Any]) -> None:
        self.waiting.extend(Fetch(visit, kv_range, after) for kv_range in visit.layer.ranges(visit.step))


def _block_bytes(cache: torch.Tensor) -> int:
    size: int = cache[:1].nbytes
    return size
