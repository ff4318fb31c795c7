"""Parameters and memory of sums by push. Needs no GPU and no torch.

``kernels/volta/src/push.h`` defines the structure that is mirrored here. Before an image is loaded, it is compared with
the manifest of the compiled images (``attention/volta/images.py``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_uint64
from dataclasses import dataclass

MOST_RANKS = 8
CHUNK_BYTES = 8
SLOT_BYTES = 16
"""A chunk with the number of its call, twice."""
HALVES = 2
CTAS = 64
"""Of every launch, because each counts its calls."""
CONSTANTS = {"most_ranks": MOST_RANKS, "chunk_bytes": CHUNK_BYTES}
"""What boards and launches depend on, besides the structure."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel, as described by the manifest (``kernels/volta/push_variants.py``)."""

    name: str
    kernel: str
    number: str
    """``fp16``, ``bf16`` or ``fp32``."""
    threads: int
    """Of a CTA."""
    architecture: int
    shared_bytes: int = 0

    def image(self, suffix: str) -> str:
        """The file name of its image. ``suffix``: ``cubin`` or ``ptx``."""
        return f"{self.name}.{suffix}"


class Push(ctypes.Structure):
    """``fastattention::Push``."""

    _fields_ = [
        *((name, c_uint64) for name in ("x", "out", "calls", "late")),
        *((f"board{rank}", c_uint64) for rank in range(MOST_RANKS)),
        *((name, c_int32) for name in ("chunks", "slots", "rank", "ranks", "looks")),
    ]

    @classmethod
    def of(
        cls,
        x: int,
        out: int,
        calls: int,
        late: int,
        boards: Sequence[int],
        chunks: int,
        slots: int,
        rank: int,
        looks: int = 0,
    ) -> Push:
        """Addresses, and numbers as ``push.h`` explains them. ``boards``: one for each rank."""
        every = [*boards, *[0] * (MOST_RANKS - len(boards))]
        return cls(x, out, calls, late, *every, chunks, slots, rank, len(boards), looks)


STRUCTURES: tuple[type[ctypes.Structure], ...] = (Push,)
"""The structures of ``push.h``."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Of a board."""

    ranks: int
    slots: int
    """Chunks of one call, at most."""

    @property
    def bytes(self) -> int:
        return HALVES * self.ranks * self.slots * SLOT_BYTES


def layout_of(ranks: int, max_bytes: int) -> Layout:
    """For sums of tensors of at most ``max_bytes``."""
    return Layout(ranks, -(-max_bytes // CHUNK_BYTES))
