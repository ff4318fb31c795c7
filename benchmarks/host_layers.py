"""One request larger than the GPU's KV memory: is every needle found, and how fast are prefill and decode?

    python benchmarks/host_layers.py --device-gib 4 --tokens 262144 524288 --json FILE
    python benchmarks/host_layers.py --plot FILE.png --from FILE.json ...              # tokens per second by context

Run by: users with contexts that do not fit their GPU, and contributors who change host layers.
Needs: an NVIDIA GPU of compute capability 8.0 or newer, vLLM's CUDA build, and host memory for the KV cache (32 GiB for
262144 tokens of the 8B shape). matplotlib alone for a plot.

The model looks numbers up in its prompt and needs every layer for it (fastattention_vllm/demo), in the attention shape,
the width and the size of an 8B Llama. --device-gib limits the memory of the GPU's KV cache to simulate a smaller card.
host_layers_ways.py says what is compared.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from host_layers_engines import SHAPES
from host_layers_plot import draw
from host_layers_ways import all_on_device, stock, with_host_layers

from fastattention_vllm.bench import machine
from fastattention_vllm.bench.report import Report, Row, report
from fastattention_vllm.bench.saved_report import saved_report
from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DemoModelSpec


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--model", type=Path, default=Path("/tmp/fastattention-demo"), help="built there if missing")
    parser.add_argument("--device-gib", type=float, default=4, help="of each GPU")
    parser.add_argument("--ranks", type=int, default=1, help="--tensor-parallel-size, with one GPU for each")
    parser.add_argument("--host-layers", type=int, help="instead of as many as the longest request needs")
    parser.add_argument("--host-gib", type=float, help="bound of the host pool")
    parser.add_argument("--cpu-threads", type=int, default=0, help="for attention, of each rank; 0: as vLLM runs it")
    parser.add_argument("--resident-gib", type=float, default=0, help="GPU memory for copies, beside --device-gib")
    parser.add_argument("--host-kv-dtype", default="auto", help="of the host pool")
    parser.add_argument("--max-model-len", type=int, default=0, help="of host layers' engine, if longer than --tokens")
    parser.add_argument("--tokens", type=int, nargs="+", default=[262144], help="length of one prompt")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="for each of --tokens, or one for all")
    parser.add_argument("--chunk", type=int, default=8192, help="--max-num-batched-tokens")
    parser.add_argument("--decode", type=int, default=8, help="tokens timed per variant")
    parser.add_argument("--speculate", type=int, default=0, help="n-gram drafts of so many tokens; use a long --decode")
    parser.add_argument("--lookup", type=int, default=1, help="shortest n-gram that finds a draft; 64 finds none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--ways",
        nargs="+",
        default=[
            "stream all",
            "CPU alone",
            "pieces",
            "graph",
            "shared graph",
            "auto",
            "drafts as found",
            "split of one token",
        ],
    )
    parser.add_argument("--engines", nargs="+", choices=["stock", "device", "host"], default=["stock", "host"])
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="only draw --from into this PNG file")
    parser.add_argument("--from", type=saved_report, nargs="+", dest="results", help="saved runs")
    options = parser.parse_args()
    if options.plot:
        draw(options.plot, options.results)
        return 0
    options.batch = options.batch * len(options.tokens) if len(options.batch) == 1 else options.batch
    path = options.model / options.shape
    if not path.exists():
        started = time.perf_counter()
        build_demo_model(path, DemoModelSpec(max_position_embeddings=1 << 20, dtype="float16", **SHAPES[options.shape]))
        print(f"model built in {time.perf_counter() - started:.0f} s", flush=True)
    measures = {"stock": stock, "device": all_on_device, "host": with_host_layers}
    if len(options.engines) == 1:
        rows = measures[options.engines[0]](path, options)
    else:
        rows = [row for name in options.engines for row in in_a_process_of_its_own(name)]
    for row in rows:
        print(row.model_dump_json(), flush=True)
    if options.json:
        memory = f"KV memory capped to {options.device_gib} GiB"
        report(
            rows, f"{torch.cuda.get_device_name()}, {memory}; {machine.hardware(len(os.sched_getaffinity(0)))}"
        ).write(options.json)
    missed = [row for row in rows if "needles" in row.metric and row.ours != row.limit]
    return 1 if missed else 0


def in_a_process_of_its_own(name: str) -> list[Row]:
    """Run an engine in a separate process, because an engine leaves GPU memory behind, especially a refused one."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        # The last value of a repeated option applies.
        command = [sys.executable, __file__, *sys.argv[1:], "--engines", name, "--json", file.name]
        if subprocess.run(command, check=False).returncode not in (0, 1):
            sys.exit(f"the engine {name!r} failed; its messages are above.")
        return Report[Row].model_validate_json(Path(file.name).read_text()).rows


if __name__ == "__main__":
    sys.exit(main())
