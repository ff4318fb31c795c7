"""Simulated NPU streams and events: copies happen as late as possible, when something waits for them.

``runtime`` replaces ``torch.npu``. Computations run at once. A non-blocking copy stays in its stream until an event
after it is waited for, and reads its source only then. As in torch_npu, a copy is asynchronous only if both ends are
contiguous and have the same dtype. Other non-blocking copies raise an AssertionError here, because torch_npu would
continue with data that has not arrived.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fastattention_vllm.placement import link


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.waiting: collections.deque[Callable[[], object]] = collections.deque()
        self.asked = 0
        self.done = 0

    def ask(self, action: Callable[[], object]) -> None:
        self.waiting.append(action)
        self.asked += 1

    def reach(self, point: int) -> None:
        while self.done < point:
            self.done += 1
            self.waiting.popleft()()

    def wait_event(self, event: Event) -> None:
        if self is runtime.main:
            event.synchronize()
        else:
            self.ask(event.synchronize)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.reach(self.asked)


class Event:
    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or runtime.current_stream()
        self.point = self.stream.asked

    def synchronize(self) -> None:
        self.stream.reach(self.point)


class Runtime:
    Stream = Stream
    Event = Event

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.main = Stream()
        self.current = self.main

    def current_stream(self) -> Stream:
        return self.current

    def current_device(self) -> int:
        return 0

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


runtime = Runtime()


@pytest.fixture
def npu_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Replaces ``torch.npu``, pinned memory and non-blocking copies for tensors on the CPU."""
    runtime.reset()
    copy, empty, to = torch.Tensor.copy_, torch.empty, torch.Tensor.to

    def copy_later(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            return copy(self, source)
        assert self.is_contiguous(), "a copy between host and NPU needs a contiguous target"
        assert source.is_contiguous(), "a copy between host and NPU needs a contiguous source"
        assert self.dtype == source.dtype
        assert self.shape == source.shape
        runtime.current.ask(functools.partial(copy, self, source))
        return self

    def to_later(self: torch.Tensor, *arguments: Any, non_blocking: bool = False, **named: Any) -> torch.Tensor:
        if not non_blocking or runtime.current is runtime.main:
            return to(self, *arguments, **named)
        there = torch.empty(self.shape, dtype=self.dtype)
        there.fill_(float("nan") if self.dtype.is_floating_point else -1)
        runtime.current.ask(functools.partial(copy, there, self))  # the NPU makes strided tensors contiguous first
        return there

    def empty_unpinned(*size: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return empty(*size, **named)

    patch.setattr(torch, "get_device_module", functools.cache(lambda device=None: runtime))  # cached, as torch's own is
    patch.setattr(torch.Tensor, "copy_", copy_later)
    patch.setattr(torch.Tensor, "to", to_later)
    patch.setattr(link.torch, "empty", empty_unpinned)
