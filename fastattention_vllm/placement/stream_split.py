"""How the CPU and the link share the reading of host KV in a decoding step. Pure functions over numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MIN_SPLIT_BYTES = 512 << 20
"""Bytes of KV per layer. With fewer bytes, the CPU alone was faster (benchmarks/notes/host_layers.md)."""
ENOUGH = 0.9
"""The fraction of the memory's rate at which the CPU needs no help."""
SAMPLE_BYTES = 2 << 30
"""Bytes of one layer's pool that are read at start to measure the rates. More than any CPU cache, and quickly read."""
HAND_OVER_SECONDS = 0.0009
"""Time between two host layers' attention, in which only the link is busy (benchmarks/notes/host_layers.md)."""

LAUNCH_SECONDS = 0.0006
"""What one graph for the whole step saves per layer (benchmarks/notes/host_layers.md)."""


@dataclass(frozen=True)
class Rates:
    """Bytes per second."""

    memory: float
    """Plain reads by the attention threads."""
    cpu: float
    """K and V read by CPU attention."""
    link: float
    """Copies from host to device."""
    cpu_beside_link: float
    link_beside_cpu: float
    in_place: float = 0.0
    """K and V read over the link by the device's attention kernels, without copies. 0 if they cannot in a graph."""

    def in_graph(self) -> float:
        """What the link delivers in a graph while the CPU reads, too.

        Copies may have been slower alone than beside the CPU, where something disturbed one of the two measurements.
        """
        return self.in_place * min(1.0, self.link_beside_cpu / self.link)

    def in_pieces(self) -> float:
        """CPU and link together, where the link copies."""
        return self.cpu_beside_link + self.link_beside_cpu

    def in_whole_step(self, shares: bool) -> float:
        """One graph for a decode step: CPU and link together if it ``shares`` with the link, else the CPU alone."""
        return self.cpu_beside_link + self.in_graph() if shares else self.cpu


@dataclass(frozen=True)
class StreamSplit:
    """How much of the decoding requests' contexts the device reads over the link while the CPU attends to the rest."""

    fraction: float
    """The device's fraction of the bytes after its head start, 0 to 1."""
    head_start: int = 0
    """Bytes per layer that are copied while the CPU waits for its next query."""
    fraction_in_graph: float | None = None
    """The device's fraction in a graph, where it reads in place and has no head start. None: :attr:`fraction`."""
    drafting: StreamSplit | None = None
    """The split with several tokens of a request, which slow the CPU down, but not the link. None: the same."""

    def of(self, size: int, *, drafts: bool = False) -> float:
        """The device's fraction of ``size`` bytes, the contexts of one layer. ``drafts``: see :attr:`drafting`."""
        if drafts and self.drafting:
            return self.drafting.of(size)
        if size < MIN_SPLIT_BYTES and self.head_start:
            return 0.0
        return min(1.0, self.fraction + (1.0 - self.fraction) * self.head_start / max(size, 1))

    def in_graph(self) -> float:
        """The device's fraction in a graph whose kernels can read over the link. Graphs hold all drafts."""
        if self.drafting:
            return self.drafting.in_graph()
        return self.fraction if self.fraction_in_graph is None else self.fraction_in_graph


def stream_split(rates: Rates, drafting: Rates | None = None) -> StreamSplit:
    """Split so that CPU and link finish together; 0 if the CPU alone is fast enough.

    The CPU reads at rate C and the link at rate P. When the CPU begins, the link has already copied H bytes. So B bytes
    take (B - H) / (C + P) from then on.

    Args:
        rates: with one token of a request.
        drafting: with all drafts. None: steps have no drafts.
    """
    if drafting:
        return replace(stream_split(rates), drafting=stream_split(drafting))
    if rates.cpu >= ENOUGH * rates.memory:
        return StreamSplit(0.0)
    fraction, in_graph = (rate / (rates.cpu_beside_link + rate) for rate in (rates.link_beside_cpu, rates.in_graph()))
    return StreamSplit(fraction, int(rates.link * HAND_OVER_SECONDS), in_graph)


def whole_steps_until(split: StreamSplit, rates: Rates | None, sharing: float = 1.0, in_graph: bool = False) -> float:
    """Bytes of the contexts in one layer from which on decoding in pieces is faster than in one graph.

    B bytes take B / C in a graph in which the CPU reads all of them, and B / (C' + :meth:`Rates.in_graph`) in one that
    shares them with the link. In pieces, they take (B - H) / (C' + P') (:func:`stream_split`), and launching takes
    longer.

    Args:
        rates: with all drafts, because graphs hold them. None if they were not measured, because the user chose the
            split, which then decides.
        sharing: the fraction of host layers that share with the link. The others, with windows, gain nothing in pieces.
        in_graph: whether the graph shares with the link.
    """
    split = split.drafting or split
    if (split.fraction == 0 and split.head_start == 0) or sharing == 0:
        return math.inf
    if rates is None:
        return math.inf if in_graph else 0.0
    together = rates.in_pieces()
    gain = 1 / rates.in_whole_step(in_graph) - 1 / together  # seconds per byte
    loss = LAUNCH_SECONDS / sharing - split.head_start / together
    if gain <= 0:
        return math.inf
    return max(MIN_SPLIT_BYTES, loss / gain)


def filled_steps_until(
    rates: Rates | None, drafting: Rates | None, sharing: float = 1.0, in_graph: bool = False
) -> float:
    """Bytes of the contexts in one layer up to which missing drafts are worth computing, so that a step is one graph.

    Graphs hold as many tokens of each request as can be drafted. With fewer drafts a step runs in pieces, where
    launching takes longer. The graph takes B / :meth:`Rates.in_whole_step` for B bytes, with all drafts. In pieces the
    CPU reads so few bytes alone (:data:`MIN_SPLIT_BYTES`), with one token.

    Args:
        rates: with one token of a request. None if they were not measured, then nothing is filled.
        drafting: with all drafts.
        sharing: the fraction of host layers without a window.
        in_graph: whether the graph shares with the link.
    """
    if rates is None or drafting is None:
        return 0.0
    loss = 1 / drafting.in_whole_step(in_graph) - 1 / rates.cpu  # seconds per byte
    if loss <= 0 or sharing == 0:
        return MIN_SPLIT_BYTES
    return min(MIN_SPLIT_BYTES, LAUNCH_SECONDS / sharing / loss)
