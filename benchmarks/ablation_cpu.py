"""The CPU's part of ablation.py: builds without a strategy, measured in turn on one thread.

Used by: ablation.py. It starts this file as `ablation_cpu.py LIBRARY PROBLEM`, one process per build, and measures
that process's own CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cpu_variants
import torch
from ablation_row import CLOSE, SKIPPING, TWO_LEVEL, row

from fastattention_vllm.bench.report import Row
from fastattention_vllm.bench.sampling import in_turn

BUILDS = Path(__file__).resolve().parents[1] / "build" / "ablation"
WINDOW = 512
ROUNDS = 5


def cpu_rows(options: argparse.Namespace) -> list[Row]:
    from fastattention_vllm.attention.cpu import kernels as cpu

    isa, tokens = cpu.isa(), options.cpu_tokens
    one_panel, one_tile = cpu_variants.rows_of_one_panel(isa), cpu_variants.one_tile(isa, tokens)
    every_key = cpu_variants.EVERY_KEY
    without = {
        f"{TWO_LEVEL} (one panel)": one_panel,
        f"{TWO_LEVEL} (one tile)": one_tile,
        SKIPPING: every_key,
        f"{TWO_LEVEL} (one panel) and {SKIPPING}": one_panel + every_key,
    }
    dtype = "bfloat16" if isa in ("amx", "avx512_bf16") else "float16"
    rows = []
    print("building the CPU kernels five times", flush=True)
    variants = cpu_variants.Variants(BUILDS, isa)
    libraries = {"": variants.build("base", ())}
    libraries |= {name: variants.build(f"v{at}", edits) for at, (name, edits) in enumerate(without.items())}
    for window in (-1, WINDOW):
        problem = {"tokens": tokens, "heads": options.cpu_heads, "window": window, "dtype": dtype}
        took = in_turns({name: ask(library, problem) for name, library in libraries.items()})
        seen = "causal" if window < 0 else f"window of {window}"
        heads = ",".join(map(str, (*options.cpu_heads, 128)))
        case = f"prefill {dtype} ({heads}) {tokens} tokens, {seen}"
        on = statistics.median(took[""])
        for name in without:
            off = statistics.median(took[name])
            rounds = {"rounds ms": [round(1e3 * one, 2) for one in took[name]]}
            where = f"CPU, {isa}, 1 thread"
            rows.append(row(name, where, case, "prefill", "ms", 1e3 * off, 1e3 * on, "measured", **rounds))
            print(f"{case}, without {name}: {1e3 * off:.1f} ms, with {1e3 * on:.1f} ms", flush=True)
    return rows


def ask(library: Path, problem: Mapping[str, Any]) -> subprocess.Popen[str]:
    """Start a process that uses this library and answers each line that it receives."""
    command = [sys.executable, __file__, str(library), json.dumps(problem)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def in_turns(processes: Mapping[str, subprocess.Popen[str]]) -> dict[str, list[float]]:
    """Seconds of each process, by rounds. All outputs must equal those of the first one."""
    took: dict[str, list[float]] = {name: [] for name in processes}
    sums: dict[str, list[float]] = {}
    try:
        for turn in range(ROUNDS + 1):
            for name in in_turn(list(processes), turn + 1):
                process = processes[name]
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write("go\n")
                process.stdin.flush()
                line = process.stdout.readline()
                if not line:
                    sys.exit(f"ablation: the build without {name or 'nothing'} has ended; its message is above.")
                found = json.loads(line)
                sums[name] = found["some"]
                if turn:  # the first one warms up
                    took[name].append(found["seconds"])
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    expected = sums[next(iter(processes))]
    for name, some in sums.items():
        far = [one - other for one, other in zip(some, expected, strict=True) if not abs(one - other) < CLOSE]
        if far:
            sys.exit(f"ablation: the build without {name} computes something else, by {far[0]}.")
    return took


def answer(library: str, problem: dict[str, Any]) -> None:
    os.environ["FASTATTENTION_CPU_LIBRARY"] = library
    from fastattention_vllm.attention.cpu import kernels as cpu
    from fastattention_vllm.attention.problem import AttentionProblem

    cpu.set_num_threads(1)
    tokens, (heads, kv_heads), dtype = problem["tokens"], problem["heads"], getattr(torch, problem["dtype"])
    seed = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn((tokens, count, 128), generator=seed).to(dtype) for count in (heads, kv_heads, kv_heads)
    )
    asked = AttentionProblem(
        query=query,
        key=key,
        value=value,
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
        kv_start_loc=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        scale=128**-0.5,
        causal=True,
        window=(problem["window"], -1),
    )
    out = torch.empty_like(query)
    for _ in sys.stdin:
        began = time.thread_time()
        cpu.run(asked, out)
        seconds = time.thread_time() - began
        some = out[:: max(1, tokens // 64), :, ::16].flatten().tolist()
        print(json.dumps({"seconds": seconds, "some": some}), flush=True)


if __name__ == "__main__":
    answer(sys.argv[1], json.loads(sys.argv[2]))
