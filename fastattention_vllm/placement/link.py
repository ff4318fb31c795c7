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

MOST_KEPT = 256
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
    def staging(self, like: torch.Tensor, blocks: int) -> torch.Tensor:
        """Device memory for ``blocks`` blocks of the host cache ``like``."""

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

    def staging(self, like: torch.Tensor, blocks: int) -> torch.Tensor:
        return torch.zeros(blocks, *like.shape[1:], dtype=like.dtype)

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


class CudaLink(Link):
    """A GPU, through torch's streams. Host memory is pinned, and addressed by the GPU at the same addresses."""

    beside = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.up = torch.cuda.Stream(device)
        self.down = torch.cuda.Stream(device)
        self._pinned: dict[str, torch.Tensor] = {}
        self._fetches: dict[int, tuple[torch.Tensor, list[tuple[int, int, int]], torch.Tensor | None]] = {}

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

    def visible(self, cache: torch.Tensor) -> torch.Tensor:
        view: torch.Tensor = torch.as_tensor(_HostMemory(cache), device=self.device)
        assert view.data_ptr() == cache.data_ptr(), "the host pool was copied instead of mapped"
        return view.view(cache.dtype).view(cache.shape)

    def staging(self, like: torch.Tensor, blocks: int) -> torch.Tensor:
        return torch.zeros(blocks, *like.shape[1:], dtype=like.dtype, device=self.device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def fetch(self, cache: torch.Tensor, blocks: torch.Tensor, target: torch.Tensor, after: Sequence[Any]) -> Any:
        with torch.cuda.stream(self.up):
            for point in after:
                self.up.wait_event(point)
            runs, rows = self._how_to_fetch(blocks)
            if rows is None:
                for begin, first, count in runs:
                    target[begin : begin + count].copy_(cache[first : first + count], non_blocking=True)
            else:
                words = self.visible(cache).view(torch.int64).flatten(1)
                torch.index_select(words, 0, rows, out=target[: len(blocks)].view(torch.int64).flatten(1))
            return self.mark()

    def _how_to_fetch(self, blocks: torch.Tensor) -> tuple[list[tuple[int, int, int]], torch.Tensor | None]:
        """Runs, or if there are too many, the blocks on the device. All layers of a step fetch the same ones."""
        kept = self._fetches.get(id(blocks))
        if kept is None:
            runs = _runs(blocks)
            rows = blocks.pin_memory().to(self.device, non_blocking=True) if len(runs) > FEW_RUNS else None
            if len(self._fetches) >= MOST_KEPT:
                self._fetches.clear()
            kept = self._fetches[id(blocks)] = (blocks, runs, rows)  # with the tensor, so that its id stays its own
        return kept[1], kept[2]

    def writing(self) -> AbstractContextManager[Any]:
        self.down.wait_event(self.mark())
        return torch.cuda.stream(self.down)

    def written(self) -> Any:
        return self.down.record_event()

    def wait(self, point: Any) -> None:
        torch.cuda.current_stream().wait_event(point)

    def wait_on_host(self, point: Any) -> None:
        point.synchronize()


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


def _runs(blocks: torch.Tensor) -> list[tuple[int, int, int]]:
    """``(begin, first block, count)`` of the runs of ascending neighbours in ``blocks``; at most FEW_RUNS + 1."""
    breaks = (torch.diff(blocks) != 1).nonzero().flatten()[:FEW_RUNS] + 1
    starts = [0, *breaks.tolist()]
    return [
        (begin, int(blocks[begin]), end - begin) for begin, end in zip(starts, [*starts[1:], len(blocks)], strict=True)
    ]
