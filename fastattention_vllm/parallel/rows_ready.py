"""Rows that are there before the rest of their tensor: told by who computes them in blocks, used by who comes next.

The paper's form of tiling-AllReduce (arXiv 2410.16663, section 4.2) is attention of a block of rows, its o_proj, its
sum, while the next block attends. To a model these are two ops. Attention orders its blocks one after the other and
marks the end of each; o_proj, ordered after it, waits for no more than the mark of its own block, on a stream beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch


class RowsReady:
    """From one layer's attention to its o_proj, then to the next layer's: one for all layers of a rank."""

    def __init__(self, outputs: int) -> None:
        """``outputs``: of the layer that comes next; its output is made before the first block is computed, so that
        nobody still works on that memory when the first of its rows are there."""
        self._outputs = outputs
        self._tensor: torch.Tensor | None = None
        """Kept until it is taken: as long as it lives, no other tensor can lie at its address."""
        self._marks: list[tuple[int, torch.cuda.Event | None]] = []
        self._out: torch.Tensor | None = None
        self._begun: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def begin(self, tensor: torch.Tensor) -> None:
        """The blocks of ``tensor`` ([rows, ...]) are about to be computed."""
        self._tensor = tensor
        self._out = tensor.new_empty(tensor.shape[0], self._outputs)
        self._begun = _event(tensor)
        self._marks = []

    def mark(self, tensor: torch.Tensor, end: int) -> None:
        """Rows up to ``end`` are there once what has been ordered so far is done."""
        self._marks.append((end, _event(tensor)))

    def pop(self, x: torch.Tensor) -> PendingRows | None:
        """What has been marked of ``x``, once; None if it was not computed in blocks."""
        marks, out, begun = self._marks, self._out, self._begun
        tensor = self._tensor
        same = bool(marks) and tensor is not None and x.data_ptr() == tensor.data_ptr() and x.dtype == tensor.dtype
        self._tensor, self._marks, self._out, self._begun = None, [], None, None
        if not same or out is None or out.shape[0] != x.shape[0]:
            return None
        if x.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(x.device, priority=-1)
        return PendingRows(out, marks, begun, self._stream if x.is_cuda else None)


class PendingRows:
    """Blocks to wait for, and where what comes of them goes."""

    def __init__(
        self,
        out: torch.Tensor,
        marks: Sequence[tuple[int, torch.cuda.Event | None]],
        begun: torch.cuda.Event | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.out = out
        """[rows, outputs]."""
        self._marks, self._begun, self._stream = marks, begun, stream

    @property
    def blocks(self) -> tuple[int, ...]:
        """Rows of each; the last one also has those that were never marked, which nobody reads."""
        ends = [end for end, _ in self._marks[:-1]] + [self.out.shape[0]]
        return tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is ordered inside runs beside what was ordered before; what is ordered after waits for it."""
        if self._stream is None or self._begun is None:
            yield
            return
        self._stream.wait_event(self._begun)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def waiting(self, compute: Callable[[slice, torch.Tensor], object]) -> Callable[[slice, torch.Tensor], None]:
        """``compute`` (see ``compute_and_sum``), each block of :attr:`blocks` after its mark."""
        marks = iter(self._marks)

        def computed(rows: slice, block: torch.Tensor) -> None:
            _, event = next(marks)
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
            compute(rows, block)

        return computed


def _event(tensor: torch.Tensor) -> torch.cuda.Event | None:
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
