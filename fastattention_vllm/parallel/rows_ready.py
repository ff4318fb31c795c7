"""Rows of a tensor that are ready before the rest: attention marks them, and the following o_proj uses them.

In the paper's form of tiling-AllReduce (arXiv 2410.16663, section 4.2), attention, o_proj and the sum of one block run
while attention of the next block runs. In a model, attention and o_proj are two ops. Attention launches its blocks one
after the other and marks the end of each. o_proj is launched later, but each of its blocks waits only for the mark of
its own block, on a separate stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch


class RowsReady:
    """The connection between attention and o_proj. One object serves all layers of a rank, one after the other."""

    def __init__(self, outputs: int) -> None:
        """``outputs``: number of outputs of the following layer. Its output is allocated before the first block is
        computed, so that this memory is no longer in use when its first rows are written."""
        self._outputs = outputs
        self._tensor: torch.Tensor | None = None
        """Kept until it is popped. As long as it exists, no other tensor can have its address."""
        self._marks: list[tuple[int, torch.cuda.Event | None]] = []
        self._out: torch.Tensor | None = None
        self._begun: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def begin(self, tensor: torch.Tensor) -> None:
        """Call this before the blocks of ``tensor`` ([rows, ...]) are computed."""
        self._tensor = tensor
        self._out = tensor.new_empty(tensor.shape[0], self._outputs)
        self._begun = _event(tensor)
        self._marks = []

    def mark(self, tensor: torch.Tensor, end: int) -> None:
        """Mark that rows up to ``end`` are ready when the work launched so far is done."""
        self._marks.append((end, _event(tensor)))

    def pop(self, x: torch.Tensor) -> PendingRows | None:
        """The marked rows of ``x``, once; None if it was not computed in blocks."""
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
    """The blocks to wait for, and the output for their results."""

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
        """Rows per block. The last block includes rows that were never marked, which nobody reads."""
        ends = [end for end, _ in self._marks[:-1]] + [self.out.shape[0]]
        return tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run the work of the body in parallel with earlier work. Later work waits for it."""
        if self._stream is None or self._begun is None:
            yield
            return
        self._stream.wait_event(self._begun)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def waiting(self, compute: Callable[[slice, torch.Tensor], object]) -> Callable[[slice, torch.Tensor], None]:
        """Wrap ``compute`` (see ``compute_and_sum``), so that each block of :attr:`blocks` waits for its mark."""
        marks = iter(self._marks)

        def computed(rows: slice, block: torch.Tensor) -> None:
            _, event = next(marks)
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
            compute(rows, block)

        return computed


def _event(tensor: torch.Tensor) -> torch.cuda.Event | None:
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
