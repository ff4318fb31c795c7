"""Memory that is available to this process, and allocation in steps, so that a shortage is noticed in time."""

from __future__ import annotations

import math
import mmap
import time
import weakref
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char

import psutil
import torch

from fastattention_vllm.attention.cpu import memory as cpu_memory
from fastattention_vllm.placement import cgroups
from fastattention_vllm.placement.memory_turns import Turns
from fastattention_vllm.placement.pinning import Pinning

GIB = 1 << 30
HUGE_PAGE = 2 << 20
SLICE = 256 << 20
"""Bytes that are committed between two checks of the available memory."""
KEEP = 512 << 20
"""Bytes that are always left to other programs."""
PATIENCE = 20.0
"""Seconds to wait for memory. Some virtual machines get more memory only when the present amount is nearly used up."""
SAY_EVERY = 3.0
"""Seconds between two lines about the progress."""
LONG_TO_PIN = 8 << 30
"""Bytes from which on pinning takes seconds."""
CGROUP = cgroups.ROOT
TURNS = Turns()
MAP_NORESERVE = 0x4000  # from <sys/mman.h> on x86 and Arm; Python defines it from 3.13 on


def available_bytes() -> int:
    """Memory that this process can still allocate: the machine's, or the headroom of its cgroups if that is smaller."""
    available = int(psutil.virtual_memory().available)
    left = cgroups.memory_left(CGROUP)
    return available if left is None else min(available, left)


def commit(
    size: int,
    nodes: Sequence[int] = (),
    *,
    pin: Pinning | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> tuple[torch.Tensor, list[cpu_memory.MemoryPlacement]]:
    """``[size]`` uint8 zeros in huge pages on the NUMA ``nodes``. All pages are touched. Freed with the last view.

    ``pin`` registers the memory with the device, which then copies to and from it at full speed. ``say`` is called with
    a line of text every few seconds.

    Raises:
        MemoryError: the machine or the cgroup has less memory, or the device's driver cannot pin that much. The text
            says how much was available. Everything is released.
    """
    whole = -(-size // HUGE_PAGE) * HUGE_PAGE
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        mapping = mmap.mmap(-1, whole + HUGE_PAGE, flags=flags)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"{size / GIB:.2f} GiB of address space could not be reserved ({error})") from error
    base = addressof(c_char.from_buffer(mapping))
    begin = -(-base // HUGE_PAGE) * HUGE_PAGE
    placements = []
    said = time.monotonic()
    for offset in range(0, whole, SLICE):
        if time.monotonic() - said > SAY_EVERY:
            said = time.monotonic()
            say(f"{offset / GIB:.1f} of {size / GIB:.1f} GiB are allocated")
        step = min(SLICE, whole - offset)
        placed = _place(begin + offset, step, nodes, say)
        if placed is None:
            del mapping
            raise MemoryError(f"only {offset / GIB:.2f} of {size / GIB:.2f} GiB could be allocated")
        placements.append(placed)
    if pin:
        mapping.madvise(mmap.MADV_DONTFORK)  # after a fork, a write here could move a page away from the device
        if whole > LONG_TO_PIN:
            say(f"{size / GIB:.1f} GiB are allocated and are now pinned for the device")
        pin.register(begin, whole)
    memory = (c_char * size).from_address(begin)
    # Not at exit, because threads may still read it; Linux frees it anyway.
    weakref.finalize(memory, _drop, mapping, begin, pin).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8), placements


def _drop(mapping: mmap.mmap, begin: int, pin: Pinning | None) -> None:
    """Keeps ``mapping`` alive until it is called. Dropping the last reference unmaps the memory."""
    if pin:
        pin.unregister(begin)


def _place(
    address: int, size: int, nodes: Sequence[int], say: Callable[[str], object]
) -> cpu_memory.MemoryPlacement | None:
    """Commit a slice as soon as there is memory for it; None if there is none in time."""
    deadline = math.inf
    while True:
        with TURNS.one(say):
            if available_bytes() >= size + KEEP:
                return cpu_memory.place_memory(address, size, nodes, discard=True)
        deadline = min(deadline, time.monotonic() + PATIENCE)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.1)
