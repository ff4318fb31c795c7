"""The host time of one decoding layer of the V100's kernels: launched eagerly, and replayed as a CUDA graph.

    python benchmarks/volta_launch_cost.py --kernels ptx-sm_75 --json FILE

Run by: owners of a V100 or T4, and contributors who change the launcher (fastattention_vllm/attention/volta).
Needs: an NVIDIA GPU, and what `make volta` builds.

A layer is `volta.write_kv` of a new token of each sequence and `volta.attend` over 4096 tokens of each: three launches,
with 32 query heads and 8 KV heads of 128, in pages of 16 tokens. Times are medians, from the call to its return, which
waits for no kernel.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.attention.volta import kernels as volta
from fastattention_vllm.bench import gpu as gpus
from fastattention_vllm.bench import volta as bench
from fastattention_vllm.bench.report import Row, compared, report

HEADS, KV_HEADS, HEAD_SIZE, PAGE = 32, 8, 128, 16
TOKENS = 4096
BATCHES = (1, 32)
AT_A_TIME = 100
"""Layers between two waits for the GPU. With more than 1024 launches the driver's queue is full and a call waits."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="auto", help="auto, ptx or ptx-sm_75")
    parser.add_argument("--rounds", type=int, default=20, help=f"rounds of {AT_A_TIME} layers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if reason := bench.why_not(options.kernels):
        print(f"volta_launch_cost: {reason}", file=sys.stderr)
        return 2
    gpu = gpus.CudaGpu()
    volta.load(HEAD_SIZE, adjusted=False)
    rows = []
    for batch in BATCHES:
        layer, _ = decoding_layer(batch, TOKENS, gpu.device)
        eager, replayed = (
            microseconds(call, options.rounds, torch.cuda.synchronize) for call in (layer, gpu.captured([layer]))
        )
        rows.append(row(batch, eager, replayed))
        print(f"{rows[-1].case}: {eager:.1f} us eagerly, {replayed:.1f} us as a CUDA graph", flush=True)
    if options.json:
        kernels = bench.how_kernels_run(volta.target(), torch.cuda.get_device_capability())
        report(rows, gpus.hardware(), gpus.versions(), kernels=kernels).write(options.json)
    return 0


def decoding_layer(batch: int, tokens: int, device: torch.device) -> tuple[Callable[[], None], torch.Tensor]:
    """A function that launches the layer, and its output tensor."""
    pages = -(-tokens // PAGE)
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    # Laid out as in vLLM.
    cache = torch.randn(batch * pages, KV_HEADS, PAGE, 2 * HEAD_SIZE, dtype=torch.float16, device=device)
    key_cache, value_cache = cache.transpose(1, 2).split(HEAD_SIZE, dim=-1)
    key, value = torch.randn(2, batch, KV_HEADS, HEAD_SIZE, dtype=torch.float16, device=device)
    slots = table[:, -1].long() * PAGE + (tokens - 1) % PAGE
    problem = AttentionProblem(
        query=torch.randn(batch, HEADS, HEAD_SIZE, dtype=torch.float16, device=device),
        key=key_cache,
        value=value_cache,
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=device),
        seq_lens=torch.full((batch,), tokens, dtype=torch.int32, device=device),
        scale=HEAD_SIZE**-0.5,
        causal=True,
        block_table=table,
    )
    out = torch.empty_like(problem.query)
    floats = volta.partial_floats(HEAD_SIZE, HEADS // KV_HEADS, KV_HEADS, batch, tokens)
    workspace = torch.empty(floats, device=device)
    extent = volta.Extent(1, tokens)

    def launch() -> None:
        volta.write_kv(key, value, key_cache, value_cache, slots)
        volta.attend(problem, extent, out, workspace=workspace)

    return launch, out


def microseconds(call: Callable[[], Any], rounds: int, wait: Callable[[], object]) -> float:
    """Median host time of one ``call``."""
    took = []
    for turn in range(rounds + 1):
        for _ in range(AT_A_TIME):
            began = time.perf_counter_ns()
            call()
            if turn:  # the first one warms up
                took.append(time.perf_counter_ns() - began)
        wait()
    return statistics.median(took) / 1e3


def row(batch: int, eager: float, replayed: float) -> Row:
    return compared(
        f"decode fp16 ({HEADS},{KV_HEADS},{HEAD_SIZE}) {TOKENS} b{batch}, one layer",
        "decode launch cost",
        "us",
        eager,
        better="lower",
        peer_name="the same launches as a CUDA graph",
        peer=replayed,
    )


if __name__ == "__main__":
    sys.exit(main())
