"""Placement of host memory: huge pages, NUMA nodes, and first touch by the attention threads.

Attention over a long context reads gigabytes once per step. With 4 KiB pages, address translation alone costs a large
part of the memory's rate, and if all pages are on one node, the other nodes' memory controllers are idle. Placement is
best effort: requests that are not met are reported, but raise no error.
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
    """The placement of a range of memory."""

    huge_bytes: int | None
    """Bytes in huge pages at the time of placement; None if /proc does not report it."""
    num_nodes: int
    """Number of NUMA nodes in the policy; 0 if none was requested or none could be set."""
    reason: str
    """Sentences that explain which requests were not met; empty if all were."""


def place_memory(address: int, size: int, nodes: Sequence[int] = (), *, discard: bool = False) -> MemoryPlacement:
    """Request huge pages and NUMA nodes for ``size`` bytes at ``address``.

    Only whole huge pages (2 MiB) inside the range are placed. ``nodes``: several nodes are interleaved, one node is
    preferred, and none leaves the policy unchanged. With ``discard``, the range is zero afterwards, and its pages are
    new and first touched by the attention threads. Without it, the content is kept, and Linux moves pages if it can.

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
