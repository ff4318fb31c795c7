"""`vllm bench serve` against this backend without host layers and against vLLM's own FLASH_ATTN: is there any cost?

    python benchmarks/serve_gpu.py --json FILE

Run by: contributors who change what runs on GPUs of compute capability 8.0 or newer.
Needs: such a GPU with about 40 GiB of memory, and vLLM's CUDA build.

Both servers are on the same GPU throughout and are measured in turn, one idle while the other answers. The model has
the shape and the size of an 8B Llama (fastattention_vllm/demo).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fastattention_vllm.bench import machine
from fastattention_vllm.bench.report import Row, compared, report
from fastattention_vllm.bench.sampling import in_turn
from fastattention_vllm.bench.serving import HOST, Server, ServerError
from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DemoModelSpec

BACKENDS = {
    "ours": [
        *("--attention-backend", "fastattention"),
        *("--additional-config", '{"fastattention": {"host_kv_layers": 0}}'),
    ],
    "peer": ["--attention-backend", "FLASH_ATTN"],
}
METRICS = {  # name in vLLM's result: (name in ours, unit, whether more is better)
    "output_throughput": ("serve throughput", "tokens/s", True),
    "median_ttft_ms": ("serve time to first token", "ms", False),
    "median_tpot_ms": ("serve time per token", "ms", False),
}
SHAPE = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "min_hidden_size": 4096}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("/tmp/fastattention-demo/8b"), help="built if not there")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--input-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.model.exists():
        spec = DemoModelSpec(
            num_layers=options.layers,
            dtype="float16",
            max_position_embeddings=1 << 20,
            min_intermediate_size=14336,
            **SHAPE,
        )
        build_demo_model(options.model, spec)
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows = measure(Path(folder), options)
        except ServerError as error:
            sys.exit(f"serve_gpu: {error}")
    for row in rows:
        print(row.model_dump_json(), flush=True)
    if options.json:
        hardware = f"{torch.cuda.get_device_name()}; {machine.hardware(len(os.sched_getaffinity(0)))}"
        report(rows, hardware).write(options.json)
    return 0


def measure(folder: Path, options: argparse.Namespace) -> list[Row]:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(options.model), "--dtype", "float16"]
    command += ["--max-model-len", "8192", "--gpu-memory-utilization", "0.35", "--no-enable-prefix-caching"]
    servers: list[Server] = []
    results: dict[tuple[int, str], list[dict[str, Any]]] = {}
    try:
        for name, backend in BACKENDS.items():
            servers.append(Server(name, [*command, *backend], os.environ, folder / f"{name}.log"))
            servers[-1].wait_until_healthy()  # one after the other, because each checks how much memory is left
        for number in range(options.rounds):
            for concurrency in options.concurrency:
                for server in in_turn(servers, number):
                    found = ask(server, concurrency, folder, options)
                    results.setdefault((concurrency, server.name), []).append(found)
                    print(
                        f"{server.name}, {concurrency} at a time: {found['median_tpot_ms']:.3f} ms a token", flush=True
                    )
    finally:
        for server in servers:
            server.stop()
    return [row(concurrency, metric, results, options) for concurrency in options.concurrency for metric in METRICS]


def ask(server: Server, concurrency: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run of ``vllm bench serve``; the same prompts for both."""
    arguments = {
        "--base-url": f"http://{HOST}:{server.port}",
        "--model": options.model,
        "--dataset-name": "random",
        "--random-input-len": options.input_tokens,
        "--random-output-len": options.output_tokens,
        "--num-prompts": 8 * concurrency,
        "--max-concurrency": concurrency,
        "--num-warmups": concurrency,
        "--seed": 0,
        "--result-dir": folder,
        "--result-filename": "result.json",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    command += ["--ignore-eos", "--save-result", "--disable-tqdm"]
    command += [str(part) for pair in arguments.items() for part in pair]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServerError(f"vllm bench serve failed against {server.name}:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    if result["completed"] != 8 * concurrency:
        raise ServerError(f"{server.name} answered {result['completed']} of {8 * concurrency} requests.")
    return result


def row(
    concurrency: int, metric: str, results: dict[tuple[int, str], list[dict[str, Any]]], options: argparse.Namespace
) -> Row:
    name, unit, more_is_better = METRICS[metric]
    values = {who: [result[metric] for result in results[concurrency, who]] for who in BACKENDS}
    ours, peer = statistics.median(values["ours"]), statistics.median(values["peer"])
    return compared(
        f"fp16 (32,8,128) {options.layers} layers, {options.input_tokens} + {options.output_tokens} tokens, "
        f"{concurrency} at a time",
        name,
        unit,
        ours,
        better="higher" if more_is_better else "lower",
        peer_name="vLLM FLASH_ATTN",
        peer=peer,
        rounds=values,
    )


if __name__ == "__main__":
    sys.exit(main())
