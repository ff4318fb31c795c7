"""How long until the attention pool works: called back to back, after a pause, after a sleep; and what it costs idle.

    python benchmarks/cpu_wake.py --threads 2 --json FILE

A call of as many equal items as there are threads takes one item's time if all threads begin at once. What it takes
beyond that is the time until the last of them had begun, and until its caches are as warm as the caller's: calls
of one item, after the same pauses and in turn with the others, are subtracted. On a virtual machine most of the time
after a long pause is the host's: it has taken the idle CPU away.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastattention_vllm.attention import cpu
from fastattention_vllm.attention.problem import AttentionProblem

PAUSES = {"back to back": (0.0, 1000), "after 1 ms": (0.001, 400), "after 1 s": (1.0, 15)}
GROUP, TOKENS, HEAD_SIZE = 128, 256, 128  # one item: too short to be split, some 100 microseconds, 128 KiB of K and V


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=cpu.num_threads())
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()

    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:1])  # as vLLM's worker does, so that the pool has the other CPUs to itself
    torch.set_num_threads(1)
    cpu.set_num_threads(options.threads, cpus)
    rows = [python_row(), *[pause_row(name, *pause, options.threads) for name, pause in PAUSES.items()], idle_row()]
    if options.json:
        options.json.write_text(json.dumps(report(options.threads, rows), indent=1) + "\n")
    return 0


def problem(items: int, tokens: int = TOKENS, group: int = GROUP) -> AttentionProblem:
    """One decode step with ``items`` KV heads, each of which is one work item."""
    key, value = torch.randn(2, tokens, items, HEAD_SIZE).to(torch.bfloat16)
    return AttentionProblem(
        query=torch.randn(1, items * group, HEAD_SIZE).to(torch.bfloat16),
        key=key,
        value=value,
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        kv_start_loc=torch.zeros(1, dtype=torch.int32),
        scale=HEAD_SIZE**-0.5,
        causal=True,
    )


def pause_row(name: str, pause: float, repeats: int, threads: int) -> dict[str, Any]:
    shared, alone = call(problem(threads)), call(problem(1))
    late = [microseconds(shared, pause) - microseconds(alone, pause) for _ in range(repeats)]
    return row(f"{threads} threads {name}", "decode wake of the pool", "us", statistics.median(late))


def python_row() -> dict[str, Any]:
    """A call so small that no other thread is asked: Python, checks and plan."""
    tiny = call(problem(2, 16, 1))
    return row(
        "16 tokens, 2 KV heads",
        "decode call overhead",
        "us",
        statistics.median(microseconds(tiny) for _ in range(2000)),
    )


def idle_row() -> dict[str, Any]:
    call(problem(cpu.num_threads()))()
    time.sleep(0.01)
    before = time.process_time()
    time.sleep(1.0)
    used = (time.process_time() - before) * 100
    return row("1 s without a call", "decode CPU use of the idle pool", "% of one CPU", used)


def call(of: AttentionProblem) -> Callable[[], object]:
    out = torch.empty_like(of.query)
    return lambda: cpu.run(of, out)


def microseconds(function: Callable[[], object], pause: float = 0.0) -> float:
    """How long ``function`` takes after ``pause`` seconds of sleep."""
    if pause:
        time.sleep(pause)
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) * 1e6


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
