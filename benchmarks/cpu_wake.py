"""How long the attention pool takes to wake up, and what it costs while idle.

    python benchmarks/cpu_wake.py --threads 2 --json FILE

Run by: contributors who change the thread pool (kernels/cpu/src).
Needs: this package with its CPU kernels, and an otherwise idle machine.

The pool measures the time from a call until the last of its threads runs: for calls back to back, after a pause, and
after a sleep. On a virtual machine, most of the time after a long pause belongs to the host, which has taken the idle
CPU away.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.bench import machine
from fastattention_vllm.bench.report import Row, report

PAUSES = {"back to back": (0.0, 1000), "after 1 ms": (0.001, 400), "after 1 s": (1.0, 15)}
HEAD_SIZE = 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=cpu.num_threads())
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()

    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:1])  # as vLLM's worker does, so that the pool has the other CPUs to itself
    torch.set_num_threads(1)
    cpu.set_num_threads(options.threads, cpus)
    rows = [call_row(), *[wake_row(name, *pause) for name, pause in PAUSES.items()], idle_row()]
    if options.json:
        found = report(rows, machine.hardware(options.threads), machine.versions() | {"isa": cpu.isa()})
        found.write(options.json)
    return 0


def problem(kv_heads: int, tokens: int, group: int) -> AttentionProblem:
    """One decode step of one request."""
    key, value = torch.randn(2, tokens, kv_heads, HEAD_SIZE).to(torch.bfloat16)
    return AttentionProblem(
        query=torch.randn(1, kv_heads * group, HEAD_SIZE).to(torch.bfloat16),
        key=key,
        value=value,
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        kv_start_loc=torch.zeros(1, dtype=torch.int32),
        scale=HEAD_SIZE**-0.5,
        causal=True,
    )


def wake_row(name: str, pause: float, repeats: int) -> Row:
    times = []
    for _ in range(repeats):
        time.sleep(pause)
        if pause == 0:
            cpu.measure_wake()  # even time.sleep(0) takes long enough for a thread to fall asleep
        times.append(cpu.measure_wake() or math.inf)
    return row(f"{cpu.num_threads()} threads {name}", "decode wake of the pool", "us", statistics.median(times) * 1e6)


def call_row() -> Row:
    """A call so small that no other thread takes part: Python, checks and plan."""
    tiny = problem(kv_heads=2, tokens=16, group=1)
    out, times = torch.empty_like(tiny.query), []
    for _ in range(2000):
        started = time.perf_counter()
        cpu.run(tiny, out)
        times.append(time.perf_counter() - started)
    return row("16 tokens, 2 KV heads", "decode call overhead", "us", statistics.median(times) * 1e6)


def idle_row() -> Row:
    cpu.measure_wake()
    time.sleep(0.01)
    before = time.process_time()
    time.sleep(1.0)
    used = (time.process_time() - before) * 100
    return row("1 s without a call", "decode CPU use of the idle pool", "% of one CPU", used)


def row(case: str, metric: str, unit: str, ours: float) -> Row:
    print(f"{metric:<32} {case:<28} {ours:8.1f} {unit}", flush=True)
    return Row(case=case, metric=metric, unit=unit, ours=ours)


if __name__ == "__main__":
    sys.exit(main())
