"""The way between host memory and one device: small tensors there and back, blocks of KV ahead of their use."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

FEW_RUNS = 32
"""Up to so many runs of neighbouring blocks are copied one by one, by the copy engine; more by one gathering kernel."""

MAX_KEPT = 256
"""Lists of blocks of which it is remembered how they were copied."""


class Link(ABC):
    """One device. Only :meth:`arrive` and :meth:`wait_on_host` return once the device has done its part."""

    beside: bool
    """Whether it computes while the host's attention threads do."""

    @abstractmethod
    def start_to_host(self, *tensors: torch.Tensor) -> Any:
        """Begin to copy device tensors of one dtype and length to the host."""

    @abstractmethod
    def arrive(self, coming: Any) -> list[torch.Tensor]:
        """The copies, complete; they stay valid until the next :meth:`start_to_host`."""

    @abstractmethod
    def host_buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory, fit for :meth:`to_device`; valid until the next call with the same name."""

    @abstractmethod
    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor on the device, in the order of the computation there."""

    @abstractmethod
    def visible(self, cache: torch.Tensor) -> torch.Tensor:
        """The same host memory as a tensor that the device's kernels can read and write."""

    @abstractmethod
    def staging(self, size: int) -> torch.Tensor:
        """``size`` bytes of device memory, uint8, filled with zeros."""

    @abstractmethod
    def mark(self) -> Any:
        """A point in the computation so far."""

    @abstractmethod
    def fetch(self, cache: torch.Tensor, blocks: torch.Tensor, target: torch.Tensor, after: Sequence[Any]) -> Any:
        """Copy the ``blocks`` (int64, on the host) of a host cache to the first rows of ``target`` on the device.

        Begins once the computation has reached all of ``after``; returns the point at which it is done.
        """

    @abstractmethod
    def writing(self) -> AbstractContextManager[Any]:
        """Device work started inside goes to the side of the computation; it begins where the computation is now."""

    @abstractmethod
    def written(self) -> Any:
        """The point at which everything started in :meth:`writing` is done."""

    @abstractmethod
    def wait(self, point: Any) -> None:
        """Let the computation go on only past ``point``."""

    @abstractmethod
    def wait_on_host(self, point: Any) -> None:
        """Return only past ``point``."""


class LocalLink(Link):
    """The "device" is the host itself: the same steps, done at once."""

    beside = False

    def start_to_host(self, *tensors: torch.Tensor) -> Any:
        return list(tensors)

    def arrive(self, coming: Any) -> list[torch.Tensor]:
        return list(coming)

    def host_buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def visible(self, cache: torch.Tensor) -> torch.Tensor:
        return cache

    def staging(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def mark(self) -> Any:
        return None

    def fetch(self, cache: torch.Tensor, blocks: torch.Tensor, target: torch.Tensor, after: Sequence[Any]) -> Any:
        torch.index_select(cache.view(torch.uint8), 0, blocks, out=target[: len(blocks)].view(torch.uint8))

    def writing(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def written(self) -> Any:
        return None

    def wait(self, point: Any) -> None:
        pass

    def wait_on_host(self, point: Any) -> None:
        pass


class StreamLink(Link):
    """A device of torch's that has streams: copies run on two of their own, beside the computation."""

    beside = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.runtime: Any = torch.get_device_module(device)
        self.up = self.runtime.Stream(device)
        self.down = self.runtime.Stream(device)
        self._pinned: dict[str, torch.Tensor] = {}
        self._fetches: dict[int, tuple[torch.Tensor, Any]] = {}

    def start_to_host(self, *tensors: torch.Tensor) -> Any:
        packed = torch.cat([tensor.flatten(1) for tensor in tensors], dim=1)  # one transfer instead of several
        copy = self.host_buffer("to host", packed.shape, packed.dtype)
        copy.copy_(packed, non_blocking=True)
        return self.mark(), copy, [tensor.shape[1:] for tensor in tensors]

    def arrive(self, coming: Any) -> list[torch.Tensor]:
        there, copy, shapes = coming
        there.synchronize()
        parts = copy.split([math.prod(shape) for shape in shapes], dim=1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]

    def host_buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory is dear to allocate, so it is kept; what reads it has passed before it is used again.

        A step's host layers come one after the other, and each waits for the device before it overwrites these.
        """
        size = math.prod(shape) * dtype.itemsize
        kept = self._pinned.get(name)
        if kept is None or kept.nbytes < size:
            kept = self._pinned[name] = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        return kept[:size].view(dtype).view(tuple(shape))

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)

    def staging(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def mark(self) -> Any:
        event = self.runtime.Event()
        event.record()
        return event

    def fetch(self, cache: torch.Tensor, blocks: torch.Tensor, target: torch.Tensor, after: Sequence[Any]) -> Any:
        with self.runtime.stream(self.up):
            for point in after:
                self.up.wait_event(point)
            self._copy(cache, target, self._how_to_fetch(blocks))
            return self.mark()

    def _how_to_fetch(self, blocks: torch.Tensor) -> Any:
        """All layers of a step fetch the same ones."""
        kept = self._fetches.get(id(blocks))
        if kept is None:
            if len(self._fetches) >= MAX_KEPT:
                self._fetches.clear()
            # With the tensor, so that its id stays its own.
            kept = self._fetches[id(blocks)] = (blocks, self._plan(blocks))
        return kept[1]

    @abstractmethod
    def _plan(self, blocks: torch.Tensor) -> Any:
        """How the ``blocks`` (int64, on the host) of any cache are copied, found once for all layers."""

    @abstractmethod
    def _copy(self, cache: torch.Tensor, target: torch.Tensor, plan: Any) -> None:
        """Begin to copy as :meth:`_plan` says, from a host cache to the first rows of ``target``."""

    def writing(self) -> AbstractContextManager[Any]:
        self.down.wait_event(self.mark())
        stream: AbstractContextManager[Any] = self.runtime.stream(self.down)
        return stream

    def written(self) -> Any:
        return self.down.record_event()

    def wait(self, point: Any) -> None:
        self.runtime.current_stream().wait_event(point)

    def wait_on_host(self, point: Any) -> None:
        point.synchronize()


class CudaLink(StreamLink):
    """An NVIDIA GPU. Host memory is pinned, and addressed by the GPU at the same addresses."""

    def visible(self, cache: torch.Tensor) -> torch.Tensor:
        view: torch.Tensor = torch.as_tensor(_HostMemory(cache), device=self.device)
        assert view.data_ptr() == cache.data_ptr(), "the host pool was copied instead of mapped"
        return view.view(cache.dtype).view(cache.shape)

    def _plan(self, blocks: torch.Tensor) -> tuple[list[tuple[int, int, int]], torch.Tensor | None]:
        """Runs, or if there are too many, the blocks on the device."""
        runs = runs_of(blocks, FEW_RUNS + 1)
        rows = blocks.pin_memory().to(self.device, non_blocking=True) if len(runs) > FEW_RUNS else None
        return runs, rows

    def _copy(self, cache: torch.Tensor, target: torch.Tensor, plan: Any) -> None:
        runs, rows = plan
        if rows is None:
            copy_runs(cache, target, runs)
        else:
            words = self.visible(cache).view(torch.int64).flatten(1)
            torch.index_select(words, 0, rows, out=target[: len(rows)].view(torch.int64).flatten(1))


class _HostMemory:
    """Registered host memory for ``torch.as_tensor``: under unified addressing the GPU has it at the same address."""

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }
        self._tensor = tensor


def copy_runs(cache: torch.Tensor, target: torch.Tensor, runs: Sequence[tuple[int, int, int]]) -> None:
    """Begin to copy :func:`runs_of` blocks of ``cache`` to the first rows of ``target``."""
    for begin, first, count in runs:
        target[begin : begin + count].copy_(cache[first : first + count], non_blocking=True)


def runs_of(blocks: torch.Tensor, maximum: int | None = None) -> list[tuple[int, int, int]]:
    """``(begin, first block, count)`` of the runs of ascending neighbours in ``blocks``.

    No more than ``maximum``, the last of which is then the rest, whatever it holds.
    """
    breaks = (torch.diff(blocks) != 1).nonzero().flatten()[: None if maximum is None else maximum - 1] + 1
    starts = [0, *breaks.tolist()]
    firsts = blocks[starts].tolist()
    ends = [*starts[1:], len(blocks)]
    return [(begin, first, end - begin) for begin, first, end in zip(starts, firsts, ends, strict=True)]
