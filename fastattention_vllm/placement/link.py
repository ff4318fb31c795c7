"""Copies between host memory and one device: small tensors in both directions, and prefetched blocks of KV."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

FEW_RUNS = 32
"""Up to this number of runs of neighbouring blocks, the copy engine copies each run. More runs use a gather kernel."""

MAX_KEPT = 256
"""Number of block lists for which the copy plan is kept."""


class Link(ABC):
    """Copies to and from one device. Only :meth:`arrive` and :meth:`wait_on_host` wait for the device."""

    beside: bool
    """Whether the device computes in parallel with the host's attention threads."""

    @abstractmethod
    def start_to_host(self, *tensors: torch.Tensor) -> Any:
        """Start copying device tensors of the same dtype and length to the host."""

    @abstractmethod
    def arrive(self, coming: Any) -> list[torch.Tensor]:
        """Wait for the copies and return them. They stay valid until the next :meth:`start_to_host`."""

    @abstractmethod
    def host_buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory for :meth:`to_device`, valid until the next call with the same name."""

    @abstractmethod
    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the device, in stream order."""

    @abstractmethod
    def visible(self, cache: torch.Tensor) -> torch.Tensor:
        """A view of the host memory that the device's kernels can read and write."""

    @abstractmethod
    def staging(self, size: int) -> torch.Tensor:
        """``size`` bytes of device memory, uint8, filled with zeros."""

    @abstractmethod
    def mark(self) -> Any:
        """An event that happens when all computation started so far is done."""

    @abstractmethod
    def fetch(self, cache: torch.Tensor, blocks: torch.Tensor, target: torch.Tensor, after: Sequence[Any]) -> Any:
        """Copy the ``blocks`` (int64, on the host) of a host cache to the first rows of ``target`` on the device.

        The copy begins after all events of ``after``. Returns the event after which it is done.
        """

    @abstractmethod
    def writing(self) -> AbstractContextManager[Any]:
        """Run the device work of the body in parallel with the computation. It begins after the current computation."""

    @abstractmethod
    def written(self) -> Any:
        """The event after which everything started in :meth:`writing` is done."""

    @abstractmethod
    def wait(self, point: Any) -> None:
        """Make the computation that is started from now on wait for ``point``."""

    @abstractmethod
    def wait_on_host(self, point: Any) -> None:
        """Block the calling thread until ``point``."""


class LocalLink(Link):
    """The link if the "device" is the host itself: the same steps, without copies."""

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
    """A torch device with streams. Copies run on two separate streams, in parallel with the computation."""

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
        """Pinned buffers are kept, because allocating them is expensive.

        Reuse is safe: host layers run one after the other, and each waits for the device before it overwrites them.
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
        """The copy plan for ``blocks``, shared by all layers of a step, which fetch the same blocks."""
        kept = self._fetches.get(id(blocks))
        if kept is None:
            if len(self._fetches) >= MAX_KEPT:
                self._fetches.clear()
            # Keep the tensor, so that its id is not reused.
            kept = self._fetches[id(blocks)] = (blocks, self._plan(blocks))
        return kept[1]

    @abstractmethod
    def _plan(self, blocks: torch.Tensor) -> Any:
        """The plan for copying the ``blocks`` (int64, on the host) of any cache, computed once for all layers."""

    @abstractmethod
    def _copy(self, cache: torch.Tensor, target: torch.Tensor, plan: Any) -> None:
        """Start copying from a host cache to the first rows of ``target``, according to a plan of :meth:`_plan`."""

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
    """An NVIDIA GPU. Host memory is pinned, and the GPU uses the same addresses."""

    def visible(self, cache: torch.Tensor) -> torch.Tensor:
        view: torch.Tensor = torch.as_tensor(_HostMemory(cache), device=self.device)
        assert view.data_ptr() == cache.data_ptr(), "the host pool was copied instead of mapped"
        return view.view(cache.dtype).view(cache.shape)

    def _plan(self, blocks: torch.Tensor) -> tuple[list[tuple[int, int, int]], torch.Tensor | None]:
        """The runs of blocks; if there are too many, also the block ids on the device."""
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
    """Registered host memory for ``torch.as_tensor``. With unified addressing, the GPU uses the same address."""

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
    """Start copying ``runs`` (:func:`runs_of`) of blocks of ``cache`` to the first rows of ``target``."""
    for begin, first, count in runs:
        target[begin : begin + count].copy_(cache[first : first + count], non_blocking=True)


def runs_of(blocks: torch.Tensor, maximum: int | None = None) -> list[tuple[int, int, int]]:
    """``(begin, first block, count)`` of the runs of ascending neighbours in ``blocks``.

    At most ``maximum`` runs. If there are more, the last one contains all remaining blocks.
    """
    breaks = (torch.diff(blocks) != 1).nonzero().flatten()[: None if maximum is None else maximum - 1] + 1
    starts = [0, *breaks.tolist()]
    firsts = blocks[starts].tolist()
    ends = [*starts[1:], len(blocks)]
    return [(begin, first, end - begin) for begin, first, end in zip(starts, firsts, ends, strict=True)]
