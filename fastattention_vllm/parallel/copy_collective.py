"""A sum over ranks made of copies: a rank fetches what others have put on their boards, and adds.

The copies are a GPU's copy engines', so that a sum leaves the multiprocessors to the matmul beside it but for the
additions: the paper's SDMA (arXiv 2410.16663, section 4.2) on NVIDIA GPUs. A board is memory of a rank that the other
ranks read: the GPU's own where they reach it (NVLink, PCIe), else the host's.

A block goes in pieces, which take turns on a few channels, so that one piece is fetched while another is put on the
board. Two ranks swap their pieces, and both add:

    hear "free" from the other, put the piece on the board, tell "partial"
    hear "partial", fetch the other's piece and add it, tell "free"

That is as many bytes as below, in half as many steps. A piece of more ranks is one slice for each; each rank adds up
one of them:

    put the piece on the board, tell "partial"
    hear "partial" from all, fetch the own slice from each of their boards, add; put the sum on the board, tell "summed"
    hear "summed" from all, fetch their slices

No rank writes to its board what another still reads: it hears "summed" only from ranks that have fetched all parts,
and "partial" of the next piece only from those that have fetched all sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from fastattention_vllm.parallel.collective import Collective

PARTIAL, SUMMED = 0, 1
FREE = SUMMED
"""Among two ranks, who have no sums to tell of."""
PHASES = 2
ALIGNMENT = 256
"""Bytes to which slices are rounded."""


class Copies(ABC):
    """What moves the bytes: each channel does what it is asked in the order in which it is asked."""

    rank: int
    size: int
    channels: int
    board_bytes: int
    """Of one channel on one rank."""

    @abstractmethod
    def begin(self, channel: int) -> None:
        """Nothing on the channel from now on happens before the computation so far is done."""

    @abstractmethod
    def put(self, channel: int, offset: int, tensor: torch.Tensor) -> None:
        """Copy a contiguous tensor to this rank's board, ``offset`` bytes into the channel's part."""

    @abstractmethod
    def fetch(self, channel: int, peer: int, offset: int, tensor: torch.Tensor) -> None:
        """Copy from a rank's board."""

    @abstractmethod
    def add(self, channel: int, tensor: torch.Tensor, peer: int, offset: int) -> None:
        """Add what lies on a rank's board to a tensor."""

    @abstractmethod
    def tell(self, channel: int, phase: int) -> None:
        """Let all other ranks hear the phase, and all that the channel has done before."""

    @abstractmethod
    def hear(self, channel: int, phase: int) -> None:
        """Wait until all other ranks have told the phase, once for each time they tell."""

    @abstractmethod
    def end(self, channel: int) -> Any:
        """Something for :meth:`wait`."""

    @abstractmethod
    def wait(self, ended: Any) -> None:
        """Let the computation go on only once the channel has done all before :meth:`end`."""


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
        """Each rank begins with another one, so that no board is read by all at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]
