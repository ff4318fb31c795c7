"""Time to the first token of long prompts on 1, 2 and 4 GPUs: tiling off and on, with and without peer-to-peer access.

    python benchmarks/first_token.py --links nvlink host --json FILE     # on GPUs of one machine
    python benchmarks/first_token.py --links gloo --tiny --json FILE     # anywhere

Run by: contributors who change tiling-AllReduce or host layers.
Needs: vLLM, and as many NVIDIA GPUs as the largest of --ranks; none with `--links gloo --tiny`.

Real engines (vLLM's LLM) run a model with the layers of an 8B or 70B Llama and random weights, but fewer of those
layers (--layers), so that the rest has a larger share of the time than in the whole model. Prompts are sent one at a
time and prefilled in one step; the time ends with the answer of one token. The engines of a link are

    off     tiling_all_reduce "off", on each number of GPUs
    auto    "auto"
    full    "auto" with tiling_full_form
    host    "off", half of the layers on the host
    both    full and host together

All engines are started and then measured in turn, each round with another prompt, while the others are paused: beside
six running ones, an engine on two H100 took up to 1.5 times as long. Results are medians. The link "host" sets
NCCL_P2P_DISABLE=1. An engine that is not ready after --limit seconds is ended; its log (--logs) shows where its
processes were. Rows with "predicted" in their name were not run: see first_token_prediction.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from first_token_engines import MODELS, WAYS, EngineError, measure
from first_token_prediction import measured_parts, parts_of
from first_token_rows import predicted_rows, rows_of
from tiling_ranks import LINKS, why_not

from fastattention_vllm.bench import machine
from fastattention_vllm.bench.report import Row, report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=["nvlink", "host"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="GPUs of an engine")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["off", "auto", "full"])
    parser.add_argument("--model", choices=list(MODELS), default="8B")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--min-tokens", type=int, default=2048, help="tiling_min_tokens")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--graphs", action="store_true", help="torch.compile and CUDA graphs, else eager")
    parser.add_argument("--no-prediction", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a small model in fp32, to try the benchmark itself")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for an engine to start, and to answer")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if reason := why_not(options.links, max(options.ranks)):
        print(f"first_token: {reason}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    all_parts: dict[str, dict[str, Any]] = {}
    complete = True
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        for link in options.links:
            try:
                took = measure(link, Path(folder), logs, options)
            except EngineError as error:
                print(f"first_token: {error}", flush=True)
                complete = False
                continue
            found = rows_of(link, took, options)
            if not options.no_prediction and (1, "off") in took:
                raw = measured_parts(link, options)
                complete &= raw is not None
                if raw is not None:
                    all_parts[link] = raw
                    found += predicted_rows(link, took, parts_of(raw), options)
            for row in found:
                print(row.model_dump_json(), flush=True)
            rows += found
            if options.json:
                report(rows, hardware(), complete=complete, parts=all_parts).write(options.json)
    return 0 if complete else 1


def hardware() -> str:
    host = machine.hardware(len(os.sched_getaffinity(0)))
    return (
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}; {host}" if torch.cuda.is_available() else host
    )


if __name__ == "__main__":
    sys.exit(main())
