"""How much memory this process may still take, and taking it step by step, so that too much is noticed in time."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from ctypes import addressof, c_char
from pathlib import Path

import psutil
import torch

from fastattention_vllm.attention.cpu import memory as cpu_memory
from fastattention_vllm.placement import cgroups
from fastattention_vllm.placement.pinning import Pinning

GIB = 1 << 30
HUGE_PAGE = 2 << 20
SLICE = 256 << 20
"""Committed between two looks at what is left."""
KEEP = 512 << 20
"""Left to everything else, whatever was asked for."""
PATIENCE = 20.0
"""Seconds. Some virtual machines show little memory at first and are given more once it is nearly used up."""
CGROUP = cgroups.ROOT
MAP_NORESERVE = 0x4000  # of <sys/mman.h> on x86 and Arm; Python names it from 3.13 on


def available_bytes() -> int:
    """Memory this process may still take: the machine's available memory, or its cgroups' headroom if smaller."""
    available = int(psutil.virtual_memory().available)
    left = cgroups.memory_left(CGROUP)
    return available if left is None else min(available, left)


def commit(
    size: int, nodes: Sequence[int] = (), *, pin: Pinning | None = None
) -> tuple[torch.Tensor, list[cpu_memory.MemoryPlacement]]:
    """``[size]`` uint8 zeros in huge pages on the NUMA ``nodes``, all of it touched; freed with the last view of it.

    With ``pin`` it is made known to the device, which then copies to and from it at full speed.

    Raises:
        MemoryError: the machine or the cgroup has less, or the device's driver may not pin that much; the text says how
            much could be had. Nothing is kept then.
    """
    whole = -(-size // HUGE_PAGE) * HUGE_PAGE
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        mapping = mmap.mmap(-1, whole + HUGE_PAGE, flags=flags)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"there is no address space for {size / GIB:.2f} GiB ({error})") from error
    base = addressof(c_char.from_buffer(mapping))
    begin = -(-base // HUGE_PAGE) * HUGE_PAGE
    placements = []
    for offset in range(0, whole, SLICE):
        step = min(SLICE, whole - offset)
        with _one_at_a_time():
            if not _wait_for(step):
                del mapping
                raise MemoryError(f"only {offset / GIB:.2f} of {size / GIB:.2f} GiB could be had")
            placements.append(cpu_memory.place_memory(begin + offset, step, nodes, discard=True))
    if pin:
        pin.register(begin, whole)
    memory = (c_char * size).from_address(begin)
    # Not at exit: threads may still read, and the kernel frees it anyway.
    weakref.finalize(memory, _drop, mapping, begin, pin).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8), placements


def _drop(mapping: mmap.mmap, begin: int, pin: Pinning | None) -> None:
    """Holds ``mapping`` until it is called; the last reference unmaps."""
    if pin:
        pin.unregister(begin)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keep this user's other processes from taking what has been looked at: all ranks take their pools at once."""
    path = Path(tempfile.gettempdir()) / f"fastattention-memory-{os.getuid()}.lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:  # no folder to write to: then as if there were one rank
        yield
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _wait_for(size: int) -> bool:
    deadline = time.monotonic() + PATIENCE
    while available_bytes() < size + KEEP:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
