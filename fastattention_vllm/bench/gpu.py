"""One NVIDIA GPU: its name and versions, and times of what runs on it, by CUDA events.

Used by: volta.py, benchmarks/volta_launch_cost.py and scripts/sanitize_gpu.py.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fastattention_vllm.bench.sampling import Samples, in_turn

SAMPLE_SECONDS = 0.02
"""A sample repeats a call for about so long."""
MAX_CALLS = 1000
SLOW_SECONDS = 1.0
"""A call longer than this gets three samples."""


class Gpu(Protocol):
    """What measuring needs of a device; tests have one without a GPU."""

    device: torch.device

    def seconds(self, call: Callable[[], Any]) -> float:
        """From the first kernel that ``call`` starts until its last one ends."""

    def captured(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        """All of them as one that costs the CPU next to nothing; raises where they cannot be captured."""

    def free(self) -> None:
        """Give memory back that nobody uses."""


class CudaGpu:
    """torch's current GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def seconds(self, call: Callable[[], Any]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3

    def captured(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for call in calls:
                call()

        def replay(_kept: Sequence[Callable[[], Any]] = tuple(calls)) -> None:
            graph.replay()  # goes by the addresses of the calls' tensors, which must not be given back meanwhile

        return replay

    def free(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@dataclass(slots=True)
class Timed:
    """A contender's samples: seconds per call of one layer."""

    name: str
    call: Callable[[], Any]
    layers: int = 1
    """That one ``call`` goes through."""
    samples: Samples = field(default_factory=Samples)
    repeats: int = 1
    slow: bool = False


def interleave(gpu: Gpu, timed: Sequence[Timed], rounds: int) -> None:
    """Sample everyone once a round, every other round backwards: a GPU that gets hot slows everyone down."""
    for one in timed:
        gpu.seconds(one.call)
        seconds = gpu.seconds(one.call)
        one.repeats = max(1, min(MAX_CALLS, round(SAMPLE_SECONDS / max(seconds, 1e-7))))
        one.slow = seconds > SLOW_SECONDS
    for number in range(rounds):
        for one in in_turn(timed, number):
            if one.slow and number >= 3:
                continue
            one.samples.clean.append(gpu.seconds(_repeated(one)) / (one.repeats * one.layers))


def _repeated(one: Timed) -> Callable[[], None]:
    def run() -> None:
        for _ in range(one.repeats):
            one.call()

    return run


def why_not() -> str | None:
    """Why nothing can be measured here, in one sentence."""
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else f"; torch {torch.__version__} is built without CUDA"
        return f"there is no NVIDIA GPU that torch can use{built}."
    capability = torch.cuda.get_device_capability()
    if capability < (7, 0):
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {capability[0]}.{capability[1]}, the kernels need 7.0 (V100) or newer."
    return None


def wake() -> None:
    """Make torch's context the current one, which modules are loaded into."""
    torch.zeros(1, device="cuda")


def hardware() -> dict[str, str]:
    """Of torch's current GPU. What nvidia-smi does not say is left out."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    found = {
        "gpu": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "SMs": str(properties.multi_processor_count),
        "memory": f"{properties.total_memory / 2**30:.1f} GiB",
    }
    if shutil.which("nvidia-smi"):
        asked = ("driver_version", "clocks.max.sm", "clocks.max.memory", "power.limit")
        # Not by number: torch counts the visible GPUs, nvidia-smi all of them.
        command = ["nvidia-smi", f"--id=GPU-{properties.uuid}", f"--query-gpu={','.join(asked)}"]
        result = subprocess.run([*command, "--format=csv,noheader"], capture_output=True, text=True, check=False)
        values = [value.strip() for value in result.stdout.split("\n")[0].split(",")]
        if result.returncode == 0 and len(values) == len(asked):
            found |= dict(zip(asked, values, strict=True))
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "CUDA of torch": str(torch.version.cuda)}
    for name in ("fastattention-vllm", "xformers", "triton", "vllm"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
