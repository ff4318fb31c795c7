"""How long a CUDA graph waits for the host at each host layer, beside the attention itself.

    python benchmarks/graph_ring.py --json FILE

Run by: contributors who change how a graph waits for the CPU.
Needs: an NVIDIA GPU of compute capability 7.0 or newer.

A graph calls the host many times for attention over one key, which takes next to no time. Two ways to wait are
compared: a kernel that polls, and the driver's memory operations.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch

from fastattention_vllm import cuda_driver
from fastattention_vllm.attention.cpu import kernels as cpu_kernels
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.bench import machine
from fastattention_vllm.bench.report import compared, report
from fastattention_vllm.cuda_driver import WAIT, WRITE
from fastattention_vllm.placement import cuda_bell, host_memory
from fastattention_vllm.placement.graph_calls import Bell, GraphBatch, GraphCalls
from fastattention_vllm.placement.host_attention import HostAttention, HostLayerGroup
from fastattention_vllm.placement.link import CudaLink
from fastattention_vllm.placement.pinning import CudaPinning

HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 128, 128
RINGS = 100
SPIN_SECONDS = 0.003


class MemoryOperations:
    """Rings by memory operations of the driver."""

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def settle(self) -> None:
        torch.cuda.synchronize()

    def ring(self, rung: int, answered: int, call: int, unless: int = 0) -> None:
        steps = cuda_driver.operations([(WRITE, answered, 0), (WRITE, rung, call)])
        cuda_driver.run(steps, torch.cuda.current_stream().cuda_stream)

    def wait(self, answered: int, call: int, unless: int = 0) -> None:
        cuda_driver.run(cuda_driver.operations([(WAIT, answered, call)]), torch.cuda.current_stream().cuda_stream)


class Layer:
    num_heads = HEADS

    def scales(self) -> tuple[float, float]:
        return 1.0, 1.0

    def merges(self) -> bool:
        return True

    def problem(self, **parts: object) -> AttentionProblem:
        return AttentionProblem(**{"scale": SIZE**-0.5, **parts})  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))[-options.threads :]
    cpu_kernels.set_num_threads(options.threads, cpus)
    cpu_kernels.set_spin(SPIN_SECONDS)
    bell = cuda_bell.create()
    if isinstance(bell, str):
        raise SystemExit(f"this GPU cannot ring: {bell}.")
    replays = {"kernel": replay_of(bell, cpus[0]), "memory operations": replay_of(MemoryOperations(), cpus[0])}
    times: dict[str, list[float]] = {way: [] for way in replays}
    for _ in range(options.rounds):
        for way, replay in replays.items():
            times[way].append(replay())
    medians = {way: statistics.median(found) for way, found in times.items()}
    rows = [
        compared(
            f"fp16 ({HEADS},{KV_HEADS},{SIZE}) 1 key b1",
            "overlap wait of a graph for the host, with copies",
            "us",
            medians["kernel"],
            better="lower",
            peer_name="memory operations",
            peer=medians["memory operations"],
            rounds={way: [round(one, 2) for one in found] for way, found in times.items()},
        )
    ]
    for row in rows:
        print(row.model_dump_json(), flush=True)
    if options.json:
        report(rows, f"{torch.cuda.get_device_name()}; {machine.hardware(options.threads)}").write(options.json)


def replay_of(bell: Bell, cpu: int):
    """A function that runs a graph of many calls and returns microseconds per call."""
    calls = GraphCalls(CudaLink(torch.device("cuda")), CudaPinning(), bell, cpu)
    memory, _ = host_memory.commit(2 * KV_HEADS * PAGE * 2 * SIZE * 2, pin=CudaPinning())
    cache = memory.view(torch.float16).view(2, KV_HEADS, PAGE, 2 * SIZE)
    layer = HostAttention(HostLayerGroup(calls.link, None), Layer(), cache)  # type: ignore[arg-type]
    calls.prepare(layer)
    device = torch.device("cuda")
    batch = GraphBatch(
        "0",
        torch.tensor([0, 1], dtype=torch.int32, device=device),
        torch.ones(1, dtype=torch.int32, device=device),
        torch.ones(1, 1, dtype=torch.int32, device=device),
        torch.tensor([PAGE], device=device),
    )
    query, output = (torch.zeros(1, HEADS, SIZE, dtype=torch.float16, device=device) for _ in range(2))
    key, value = (torch.zeros(1, KV_HEADS, SIZE, dtype=torch.float16, device=device) for _ in range(2))
    calls.reserve(batch, torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.bring_down(batch)
        for _ in range(RINGS):
            calls.attend(layer, batch, query, key, value, output)

    def replay() -> float:
        calls.thread.wake()
        torch.cuda.synchronize()
        started = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / RINGS * 1e6

    return replay


if __name__ == "__main__":
    main()
