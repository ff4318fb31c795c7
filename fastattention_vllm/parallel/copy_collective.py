"""Sums over ranks with copies: each rank copies its data to a board, fetches the other ranks' data, and adds.

The GPU's copy engines do the copies, so a sum uses multiprocessors only for the additions and leaves the rest to the
matmul. This is the paper's SDMA (arXiv 2410.16663, section 4.2) on NVIDIA GPUs. A board is memory that the other ranks
can read: GPU memory if they can access it (NVLink, PCIe), otherwise host memory.

A block is sent in pieces, which use a few channels in turn, so that one piece is fetched while another is copied to the
board. Two ranks exchange their pieces, and both add:

    wait for "free" from the other rank, copy the piece to the board, signal "partial"
    wait for "partial", fetch the other rank's piece and add it, signal "free"

This transfers as many bytes as the scheme below, in half as many steps. With more ranks, a piece has one slice per
rank, and each rank sums one slice:

    copy the piece to the board, signal "partial"
    wait for "partial" from all, fetch the own slice from all boards, add; copy the sum to the board, signal "summed"
    wait for "summed" from all, fetch their slices

No rank overwrites data on its board that another rank still reads. It gets "summed" only from ranks that have fetched
all parts, and "partial" of the next piece only from ranks that have fetched all sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from fastattention_vllm.parallel.collective import Collective

PARTIAL, SUMMED = 0, 1
FREE = SUMMED
"""The second signal between two ranks, which do not exchange sums."""
PHASES = 2
ALIGNMENT = 256
"""Slices are rounded to multiples of this number of bytes."""


class Copies(ABC):
    """The operations that move data. Each channel runs its operations in the order of the calls."""

    rank: int
    size: int
    channels: int
    board_bytes: int
    """Bytes of the board of one channel on one rank."""

    @abstractmethod
    def begin(self, channel: int) -> None:
        """Make the channel wait for the computation so far."""

    @abstractmethod
    def put(self, channel: int, offset: int, tensor: torch.Tensor) -> None:
        """Copy a contiguous tensor to this rank's board, ``offset`` bytes into the channel's part."""

    @abstractmethod
    def fetch(self, channel: int, peer: int, offset: int, tensor: torch.Tensor) -> None:
        """Copy from a rank's board."""

    @abstractmethod
    def add(self, channel: int, tensor: torch.Tensor, peer: int, offset: int) -> None:
        """Add data from a rank's board to a tensor."""

    @abstractmethod
    def tell(self, channel: int, phase: int) -> None:
        """Signal the phase to all other ranks, after everything that the channel has done before."""

    @abstractmethod
    def hear(self, channel: int, phase: int) -> None:
        """Wait until all other ranks have signalled the phase. Each signal is waited for once."""

    @abstractmethod
    def end(self, channel: int) -> Any:
        """An event for :meth:`wait`."""

    @abstractmethod
    def wait(self, ended: Any) -> None:
        """Make the following computation wait for everything that the channel did before :meth:`end`."""


class CopyCollective(Collective):
    """Sums as described above."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self.rank = copies.rank
        self.size = copies.size
        # A board holds a piece, and among more than two ranks one slice of its sum.
        slices = 2 if self.size == 2 else self.size + 1
        self._slice_bytes = copies.board_bytes // slices // ALIGNMENT * ALIGNMENT
        assert self._slice_bytes > 0, f"boards of {copies.board_bytes} bytes for {self.size} ranks"
        self._next = 0
        if self.size == 2:
            for channel in range(copies.channels):
                copies.tell(channel, FREE)

    def start(self, block: torch.Tensor) -> Any:
        flat = block.view(-1)
        size = flat.element_size()
        maximum = self._slice_bytes // size * self.size
        used = []
        for begin in range(0, flat.numel(), maximum):
            channel = self._next
            if channel not in used:
                self.copies.begin(channel)
                used.append(channel)
            piece = flat[begin : begin + maximum]
            if self.size == 2:
                self._swap(channel, piece)
            else:
                self._sum(channel, piece)
            self._next = (channel + 1) % self.copies.channels
        return [self.copies.end(channel) for channel in used]

    def wait(self, started: Any) -> None:
        for ended in started:
            self.copies.wait(ended)

    def _swap(self, channel: int, piece: torch.Tensor) -> None:
        copies = self.copies
        copies.hear(channel, FREE)
        copies.put(channel, 0, piece)
        copies.tell(channel, PARTIAL)
        copies.hear(channel, PARTIAL)
        copies.add(channel, piece, 1 - self.rank, 0)
        copies.tell(channel, FREE)

    def _sum(self, channel: int, piece: torch.Tensor) -> None:
        copies, size = self.copies, piece.element_size()
        grain = ALIGNMENT // size
        length = -(-piece.numel() // (self.size * grain)) * grain  # of each slice but the last ones
        offset = length * size
        slices = [piece[rank * length : (rank + 1) * length] for rank in range(self.size)]
        mine, sum_offset = slices[self.rank], self.size * self._slice_bytes
        for rank, part in enumerate(slices):
            if rank != self.rank and part.numel():
                copies.put(channel, rank * offset, part)
        copies.tell(channel, PARTIAL)
        copies.hear(channel, PARTIAL)
        if mine.numel():
            for peer in self._others():
                copies.add(channel, mine, peer, self.rank * offset)
            copies.put(channel, sum_offset, mine)
        copies.tell(channel, SUMMED)
        copies.hear(channel, SUMMED)
        for peer in self._others():
            if slices[peer].numel():
                copies.fetch(channel, peer, sum_offset, slices[peer])

    def _others(self) -> list[int]:
        """The order in which a rank visits the others. It differs by rank, so that ranks read different boards."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]
