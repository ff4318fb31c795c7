"""Where host memory lies: huge pages, NUMA nodes, first touch by the attention threads.

Attention over a long context reads gigabytes once per step: with 4 KiB pages the address translation alone costs a good
part of the memory's rate, and pages that all lie on one node leave the other nodes' memory controllers idle. Placement
is best effort; what could not be had is reported, never raised.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_char, c_int32, c_int64, c_void_p
from dataclasses import dataclass

from fastattention_vllm.attention.cpu.library import check, library


class _Placement(ctypes.Structure):
    """``fa_cpu_placement`` of ``fastattention_cpu.h``, field by field."""

    _fields_ = [("huge_bytes", c_int64), ("num_nodes", c_int32), ("reason", c_char * 244)]


@dataclass(frozen=True)
class MemoryPlacement:
    """What was achieved for a range of memory."""

    huge_bytes: int | None
    """Bytes in huge pages when it was placed; None where /proc does not say."""
    num_nodes: int
    """NUMA nodes that the policy names; 0 if none was asked for, or none could be set."""
    reason: str
    """Sentences that say why something asked for was not had; empty if all was."""


def place_memory(address: int, size: int, nodes: Sequence[int] = (), *, discard: bool = False) -> MemoryPlacement:
    """Ask for huge pages and NUMA nodes for ``size`` bytes at ``address``.

    Only whole huge pages (2 MiB) inside the range are placed. ``nodes``: several are used in turn (interleaved), one by
    preference, none leaves the policy as it is. With ``discard`` the range is zero afterwards and its pages are new,
    touched first by the attention threads; without, contents stay and pages move where the kernel can.

    Raises ``ValueError`` for a null address or a negative size.
    """
    achieved = _Placement()
    check(_functions().fa_cpu_place_memory(address, size, *_nodes(nodes), int(discard), achieved))
    return _read(achieved)


@functools.cache
def _functions() -> ctypes.CDLL:
    loaded, numbers = library(), ctypes.POINTER(c_int32)
    achieved = ctypes.POINTER(_Placement)
    loaded.fa_cpu_place_memory.argtypes = [c_void_p, c_int64, numbers, c_int32, c_int32, achieved]
    return loaded


def _nodes(nodes: Sequence[int]) -> tuple[ctypes.Array[c_int32] | None, int]:
    return ((c_int32 * len(nodes))(*nodes) if nodes else None), len(nodes)


def _read(achieved: _Placement) -> MemoryPlacement:
    huge = achieved.huge_bytes
    return MemoryPlacement(None if huge < 0 else huge, achieved.num_nodes, achieved.reason.decode())
