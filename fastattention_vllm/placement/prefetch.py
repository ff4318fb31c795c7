"""Prefetches the KV of host layers to the device, through two staging buffers.

A forward pass visits the host layers one after the other, each with the metadata (the step) of its batch. The
prefetcher knows the coming visits and fills one buffer while the other is in use. Only the visit that a range was
fetched for receives it. If a pass does not go as expected, its ranges are fetched again, so that it never uses the
content of a buffer that was fetched for something else.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch

from fastattention_vllm.placement.budget import NUM_BUFFERS, STAGING_BYTES
from fastattention_vllm.placement.link import Link


class PrefetchError(RuntimeError):
    """A layer requested host KV that was not fetched for it. This is a bug in this package."""


@dataclass(frozen=True, eq=False)
class KvRange:
    """A slice of a context's KV that is copied to the device at once."""

    begin: int
    end: int
    """The tokens of the context from ``begin`` up to, but not including, ``end``."""
    blocks: torch.Tensor
    """int64, on the host."""


class Step(Protocol):
    """The prefetcher's view of one batch."""

    @property
    def independent(self) -> bool:
        """True if no request reads blocks that another request of the batch is still writing."""


class HostLayer(Protocol):
    """The prefetcher's view of one host layer."""

    cache: torch.Tensor
    """``[num_blocks, num_kv_heads, block_size, K | V]`` in host memory."""
    written: Any
    """The event after which all writes to ``cache`` from the device are done."""

    def ranges(self, step: Any) -> Sequence[KvRange]:
        """The ranges that the device reads in ``step``, in the order in which it uses them."""


@dataclass(frozen=True, eq=False)
class Visit:
    """One layer's turn in a forward pass, with its step."""

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
    """Events that must have happened before the copy begins."""


class Prefetcher:
    """The two staging buffers of a device, and the copies into them."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.buffers: list[torch.Tensor] = []
        """uint8, on the device."""
        self.table = torch.empty(1, 0, dtype=torch.int32)
        """Block table of a buffer: its blocks in order."""
        self.free: dict[int, Any] = {}
        """Free buffers, each with the event after which its last use is over."""
        self.coming: collections.deque[tuple[Fetch, int, Any]] = collections.deque()
        """Started fetches, each with its buffer and the event after which the buffer is filled."""
        self.waiting: collections.deque[Fetch] = collections.deque()
        """Fetches that wait for a free buffer."""
        self.expected: collections.deque[Visit] = collections.deque()
        """The coming visits."""
        self.ahead = 0
        """Number of visits at the front of ``expected`` whose fetches are in ``waiting`` or ``coming``."""
        self.current: Visit | None = None
        self._pass_began: Any = None

    def reserve(self, cache: torch.Tensor) -> None:
        """Allocate device memory for blocks like those of ``cache``, if it is not allocated yet."""
        block_bytes = _block_bytes(cache)
        if not self.buffers or self.buffers[0].nbytes < block_bytes:
            assert not self.coming, "staging buffers cannot grow while they are in use"
            size = max(STAGING_BYTES, block_bytes)
            self.buffers = []  # release these before larger ones are allocated
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
        """Begin the visit of ``layer`` with ``step``.

        ``upcoming`` returns the rest of the pass, beginning with this visit. It is called at the beginning of a pass,
        and whenever the pass does not go as expected.
        """
        if self.current is not None or not self.expected or not self.expected[0].is_of(layer, step):
            self.discard()
            self.expected.extend(upcoming())
            if not self.expected or not self.expected[0].is_of(layer, step):
                raise PrefetchError("the first visit of a pass is not for the layer that is being computed")
            self._pass_began = self.link.mark()
            self._go_on()
        self.current = self.expected.popleft()
        self.ahead = max(0, self.ahead - 1)

    def fetch_now(self, after: Sequence[Any]) -> None:
        """Fetch the current visit's ranges, if they could not be fetched before the visit."""
        assert self.current is not None
        assert not self.waiting
        assert not self.coming
        self._ask(self.current, after)
        self._go_on()

    def staged(self, layer: HostLayer, step: Step, ranges: Iterable[KvRange]) -> Iterator[tuple[KvRange, torch.Tensor]]:
        """Yield each of ``ranges`` with its blocks on the device, which stay valid until the next iteration.

        Raises:
            PrefetchError: the next fetched range belongs to another layer or step, or is another range.
        """
        for wanted in ranges:
            number, blocks = self.take(layer, step, wanted)
            yield wanted, blocks
            self.give_back(number)

    def take(self, layer: HostLayer, step: Step, wanted: KvRange) -> tuple[int, torch.Tensor]:
        """The next buffer and the blocks of ``wanted`` in it. The device waits for them; the caller does not."""
        found = self.coming[0][0] if self.coming else None
        if found is None or not found.visit.is_of(layer, step) or found.kv_range is not wanted:
            came = "those of another layer, step or request" if found else "none"
            raise PrefetchError(
                f"the device needs tokens {wanted.begin} to {wanted.end} of a host layer, but {came} came next; the "
                "answer would have been wrong."
            )
        _, number, there = self.coming.popleft()
        self.link.wait(there)
        return number, self.view(number, layer.cache)

    def give_back(self, number: int) -> None:
        """Free a buffer. The computation started so far is the last to use it."""
        self.free[number] = self.link.mark()
        self._go_on()

    def end(self) -> None:
        """End the current visit."""
        not_used = (*(fetch for fetch, _, _ in self.coming), *self.waiting)
        left = [fetch for fetch in not_used if fetch.visit is self.current]
        if left:
            raise PrefetchError(f"a host layer left {len(left)} of its ranges unused, so its answer is incomplete.")
        self.current = None
        self._go_on()

    def discard(self) -> None:
        """Forget the expected visits, and everything that a failed pass has left behind."""
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
                continue  # this visit fetches nothing
            fetch = self.waiting.popleft()
            number = next(iter(self.free))
            over = self.free.pop(number)
            points = [*fetch.after, over] if over is not None else fetch.after
            cache = fetch.visit.layer.cache
            there = self.link.fetch(cache, fetch.kv_range.blocks, self.view(number, cache), points)
            self.coming.append((fetch, number, there))

    def _look_ahead(self) -> bool:
        """Request the ranges of the next expected visit, if they may be fetched before the visit."""
        if self.ahead == len(self.expected):
            return False
        visit = self.expected[self.ahead]
        # An unfinished visit of the same layer may still write to the context of this one.
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
