"""Host memory: how much, how fast, in which pages."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.cpu import roofline
from fastattention_vllm.bench import machine
from fastattention_vllm.doctor.findings import Finding
from fastattention_vllm.placement import cgroups, cpus, host_memory

GIB = 1 << 30
SERVER_NEEDS = 3 * GIB
"""vLLM's processes took 2.5 GiB for a model of 125M parameters and 1 GiB of KV cache."""
SMALL = 8 * GIB
SHM_NEEDED = 1 * GIB
"""Ranks of tensor parallelism exchange messages and sums through it; containers have 64 MiB by default."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SHARED = Path("/dev/shm")
CACHES = 4
"""So many times the last-level cache is read, and at least MIN_BYTES."""
MIN_BYTES, MAX_BYTES = 512 << 20, 4 * GIB
PART_OF_AVAILABLE = 4
PAGE = 2 << 20
SECONDS = 1.5
METHODS = (roofline.ReadMethod(0, 1), roofline.ReadMethod(2048, 2), roofline.ReadMethod(4096, 4))
MODEL_BYTES = 16e9
"""Weights of an 8B model in 16 bits."""


@dataclass(frozen=True)
class Memory:
    total: int
    available: int
    cgroup_left: int | None
    """Bytes that the control groups still allow; None without a limit."""
    huge_pages: str
    """``always``, ``madvise`` or ``never``; empty where Linux does not say."""
    shared: int | None
    """Size of /dev/shm."""
    bandwidth: float | None
    """Bytes per second that the CPU kernels' threads read; None if not measured."""
    threads: int = 0
    load: float = 0.0
    """Programs that were running, averaged over the last minute."""
    not_measured: str = ""
    """Why."""


def probe() -> Memory:
    memory = psutil.virtual_memory()
    left, load = cgroups.memory_left(host_memory.CGROUP), os.getloadavg()[0]
    bandwidth, threads, reason = measure()
    enabled = cgroups.read_text(HUGE_PAGES, "")
    return Memory(
        total=int(memory.total),
        available=int(memory.available),
        cgroup_left=left,
        huge_pages=enabled.partition("[")[2].partition("]")[0],
        shared=_shared(),
        bandwidth=bandwidth,
        threads=threads,
        load=load,
        not_measured=reason,
    )


def _shared() -> int | None:
    try:
        found = os.statvfs(SHARED)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def measure() -> tuple[float | None, int, str]:
    """Bandwidth, threads, and if there is no bandwidth the reason. Takes two or three seconds."""
    size = min(MAX_BYTES, max(MIN_BYTES, CACHES * machine.last_level_cache()))
    size = min(size, host_memory.available_bytes() // PART_OF_AVAILABLE) // PAGE * PAGE
    if size < MIN_BYTES:
        return None, 0, "too little memory is free"
    try:
        chosen = cpus.physical_cpus()
        cpu.set_num_threads(len(chosen), [] if cpus.why_not_bound() else chosen)
        memory, _ = host_memory.commit(size)
        reader = roofline.PageReader([memory.data_ptr() + at for at in range(0, size, PAGE)], [PAGE] * (size // PAGE))
        best, deadline = float("inf"), time.perf_counter() + SECONDS
        while time.perf_counter() < deadline:
            for method in METHODS:
                begin = time.perf_counter()
                reader.read(method)
                best = min(best, time.perf_counter() - begin)
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        return None, 0, str(error).rstrip(".")
    return size / best, len(chosen), ""


def findings(memory: Memory) -> list[Finding]:
    return [_amount(memory), _bandwidth(memory), *_pages(memory), *_shm(memory)]


def _amount(memory: Memory) -> Finding:
    free = memory.available if memory.cgroup_left is None else min(memory.available, memory.cgroup_left)
    text = f"{free / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB"
    fix = "Stop other programs, or use a machine with more memory."
    if memory.cgroup_left is not None and memory.cgroup_left < memory.available:
        text = f"a control group allows {free / GIB:.1f} GiB more, although {memory.available / GIB:.1f} GiB are free"
        fix = "Start the container with a higher limit, as in `docker run --memory 32g`."
    if free < SERVER_NEEDS:
        least = f"vLLM takes about {SERVER_NEEDS / GIB:.0f} GiB with the smallest model"
        return Finding("problem", "amount", f"{text}; {least}", fix)
    if free < SMALL:
        return Finding("warning", "amount", f"{text}, enough for models of about one billion parameters", fix)
    return Finding("OK", "amount", text)


def _bandwidth(memory: Memory) -> Finding:
    if memory.bandwidth is None:
        return Finding("warning", "bandwidth", f"not measured: {memory.not_measured}")
    threads = "1 thread" if memory.threads == 1 else f"{memory.threads} threads"
    tokens = memory.bandwidth / MODEL_BYTES
    text = (
        f"{memory.bandwidth / 1e9:.1f} GB/s read by {threads}: an 8B model in 16 bits decodes at most {tokens:.2g} "
        "tokens/s on this CPU for one request"
    )
    if memory.load > memory.threads:
        busy = f"measured while other programs ran (load {memory.load:.0f})"
        return Finding(
            "warning", "bandwidth", f"{text}; {busy}", "Run `fastattention doctor` again on an idle machine."
        )
    return Finding("OK", "bandwidth", text)


def _pages(memory: Memory) -> Iterator[Finding]:
    if memory.huge_pages == "never":
        yield Finding(
            "warning",
            "huge pages",
            "turned off, which makes long contexts in host memory slower",
            "Allow them to programs that ask for them.",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    elif memory.huge_pages:
        yield Finding("OK", "huge pages", f"on ({memory.huge_pages})")
    else:
        yield Finding("OK", "huge pages", "this system does not say whether it has them")


def _shm(memory: Memory) -> Iterator[Finding]:
    if memory.shared is None:
        yield Finding("warning", "/dev/shm", "missing, so tensor parallelism will not start", "Mount a tmpfs there.")
    elif memory.shared < SHM_NEEDED:
        yield Finding(
            "warning",
            "/dev/shm",
            f"{memory.shared / (1 << 20):.0f} MiB, too little for tensor parallelism",
            "Start the container with `docker run --ipc=host` or `--shm-size 8g`.",
        )
