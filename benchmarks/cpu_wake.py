"""How long until the attention pool works: called back to back, after a pause, after a sleep; and what it costs idle.

    python benchmarks/cpu_wake.py --threads 2 --json FILE

The pool measures itself: the time from a call until the last of its threads runs. On a virtual machine most of the time
after a long pause is the host's, which has taken the idle CPU away.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.problem import AttentionProblem

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
        options.json.write_text(json.dumps(report(options.threads, rows), indent=1) + "\n")
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


def wake_row(name: str, pause: float, repeats: int) -> dict[str, Any]:
    times = []
    for _ in range(repeats):
        time.sleep(pause)
        if pause == 0:
            cpu.measure_wake()  # time.sleep(0) takes long enough for a thread to fall asleep
        times.append(cpu.measure_wake() or math.inf)
    return row(f"{cpu.num_threads()} threads {name}", "decode wake of the pool", "us", statistics.median(times) * 1e6)


def call_row() -> dict[str, Any]:
    """A call so small that no other thread is asked: Python, checks and plan."""
    tiny = problem(kv_heads=2, tokens=16, group=1)
    out, times = torch.empty_like(tiny.query), []
    for _ in range(2000):
        started = time.perf_counter()
        cpu.run(tiny, out)
        times.append(time.perf_counter() - started)
    return row("16 tokens, 2 KV heads", "decode call overhead", "us", statistics.median(times) * 1e6)


def idle_row() -> dict[str, Any]:
    cpu.measure_wake()
    time.sleep(0.01)
    before = time.process_time()
    time.sleep(1.0)
    used = (time.process_time() - before) * 100
    return row("1 s without a call", "decode CPU use of the idle pool", "% of one CPU", used)


def row(case: str, metric: str, unit: str, ours: float) -> dict[str, Any]:
    print(f"{metric:<32} {case:<28} {ours:8.1f} {unit}", flush=True)
    nothing = dict.fromkeys(["peer_name", "peer", "ratio", "limit", "fraction_of_limit"])
    return {"case": case, "metric": metric, "unit": unit, "ours": round(ours, 2), **nothing}


def report(threads: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "hardware": f"{threads} threads on {os.cpu_count()} CPUs of {name}, Linux {platform.release()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "isa": cpu.isa()},
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
