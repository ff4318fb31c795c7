"""The limits of attention on this machine, measured by loops of the CPU kernel library on its own threads.

:class:`PageReader` only reads memory; :func:`peak` keeps the arithmetic units busy with registers only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass

from fastattention_vllm.attention.cpu.library import check, library


@dataclass(frozen=True, slots=True)
class ReadMethod:
    """How a thread reads: from ``streams`` places at a time, prefetching ``prefetch_bytes`` ahead."""

    prefetch_bytes: int = 0
    """0: only the hardware prefetches."""
    streams: int = 1
    """1, 2 or 4."""

    def __str__(self) -> str:
        ahead = f"software prefetch {self.prefetch_bytes} B ahead" if self.prefetch_bytes else "no software prefetch"
        return f"{self.streams} stream{'s' if self.streams > 1 else ''} a thread, {ahead}"


class PageReader:
    """Reads each page of memory once. ``pages``: their addresses; ``sizes``: their bytes, multiples of 8."""

    def __init__(self, pages: Sequence[int], sizes: Sequence[int]) -> None:
        if len(pages) != len(sizes):
            raise ValueError(f"there are {len(pages)} pages but {len(sizes)} sizes; pass one size per page.")
        self.total_bytes = sum(sizes)
        self._pages = (c_void_p * len(pages))(*pages)
        self._sizes = (c_int64 * len(sizes))(*sizes)
        self._function = library().fa_cpu_read_pages
        self._function.argtypes = [
            ctypes.POINTER(c_void_p),
            ctypes.POINTER(c_int64),
            c_int64,
            c_int32,
            c_int32,
            ctypes.POINTER(c_uint64),
        ]

    def read(self, method: ReadMethod) -> int:
        """The exclusive or of all 64-bit words. ``ValueError`` for an invalid size or method."""
        checksum = c_uint64()
        check(
            self._function(self._pages, self._sizes, len(self._pages), method.prefetch_bytes, method.streams, checksum)
        )
        return checksum.value


def peak_kinds() -> list[str]:
    """The kinds of arithmetic that can run here: ``fp32_fma``, and possibly ``bf16_dot`` and ``bf16_amx``."""
    function = library().fa_cpu_peak_kinds
    function.restype = c_char_p
    names: bytes = function()
    return names.decode().split(",")


def peak(kind: str, iterations: int) -> float:
    """Run ``iterations`` rounds of ``kind``, divided among the threads, and return the number of operations.

    Raises ``ValueError`` for a kind that is not in :func:`peak_kinds`.
    """
    function = library().fa_cpu_peak
    function.argtypes = [c_char_p, c_int64, ctypes.POINTER(c_double)]
    flops = c_double()
    check(function(kind.encode(), iterations, flops))
    return flops.value
