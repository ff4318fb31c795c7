"""Attention on CPUs for CUDA graphs, which cannot call the host: a thread of the library waits for their rings."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from ctypes import c_uint32, c_void_p

from fastattention_vllm.attention.cpu.library import (
    AttentionArguments,
    GraphCounters,
    WriteArguments,
    check,
    library,
)

DOORBELL_BYTES = 4096
ANSWER_BYTES = 64
"""``FA_CPU_DOORBELL_BYTES`` and ``FA_CPU_ANSWER_BYTES`` of ``fastattention_cpu.h``."""


class GraphThread:
    """The thread that answers the graphs of one device.

    For each call, the device sets ``answered`` to 0, writes the call's number to ``rung``, and waits until ``answered``
    is that number. Both are addresses of 32-bit words in one page of ``DOORBELL_BYTES``, which begins at ``rung``, is
    zero, and is never freed. If a call fails, the thread prints why and ends the process, because the device would wait
    forever.

    Args:
        cpu: the CPU that the thread is bound to, or -1 for the caller's affinity.
        before_close: called before the thread ends. A device that waits for an answer would wait forever.

    Raises ``ValueError`` for a CPU that cannot be used.
    """

    def __init__(self, cpu: int = -1, before_close: Callable[[], object] = lambda: None) -> None:
        handle, doorbell = c_void_p(), c_void_p()
        check(library().fa_cpu_graph_open(cpu, ctypes.byref(handle), ctypes.byref(doorbell)))
        assert doorbell.value is not None
        self.rung = doorbell.value
        self.answered = doorbell.value + ANSWER_BYTES
        self._handle = handle
        self._kept: list[object] = []
        # Not at exit: the device may still be in a step, and would wait for the rest of it.
        self.close = weakref.finalize(self, _close, handle, before_close)
        self.close.atexit = False

    def add(self, write: WriteArguments, attention: AttentionArguments, *keep: object) -> int:
        """The number of a new call: store keys and values, then attend.

        The contents of all tensors are read at each call. ``keep``: what must live as long as this thread.
        """
        number = c_uint32()
        assert self.close.alive, "the thread is closed"
        check(
            library().fa_cpu_graph_add(self._handle, ctypes.byref(write), ctypes.byref(attention), ctypes.byref(number))
        )
        self._kept.append(keep)
        return number.value

    def wake(self) -> None:
        """Announce that calls follow. Otherwise the first one after a pause may wait 10 ms."""
        assert self.close.alive, "the thread is closed"
        check(library().fa_cpu_graph_wake(self._handle))

    def counters(self) -> GraphCounters:
        """Calls, their nanoseconds, and the bytes of keys and values that they read, since the thread was started."""
        assert self.close.alive, "the thread is closed"
        counters = GraphCounters()
        check(library().fa_cpu_graph_count(self._handle, ctypes.byref(counters)))
        return counters


def _close(handle: c_void_p, before: Callable[[], object]) -> None:
    before()
    check(library().fa_cpu_graph_close(handle))
