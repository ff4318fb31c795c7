"""A whole `vllm serve` next to vLLM's own CPU build, timed at the client: the same model, prompts, CPUs and options.

    python benchmarks/serve_cpu.py --peer-python PATH --json FILE
    python benchmarks/serve_cpu.py --peer-python PATH --json FILE --model FOLDER --tokens 512 --temperature 0 1

Run by: users who decide between this package and vLLM's CPU build, and contributors who change a CPU path.
Needs: `make setup`, and an otherwise idle machine. PATH is the Python of an environment with a CPU build of vLLM.

Both servers run throughout and are measured in turn, one idle while the other answers. Without FOLDER, the model is a
Llama shape with random weights and few layers. Prompts are distinct and reach the servers' prefix caches, each timed as
prefill, before decoding is timed. CPU time is of all processes of a server, in milliseconds a step.

Without FOLDER, the rows also have the time of attention within our step. It is not measured inside the server: it is
the kernel's own time in `fastattention bench cpu` for the same shape, times the layers. There K and V are not in a CPU
cache, so for short prompts it is an upper bound.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastattention_vllm.bench import machine, serving
from fastattention_vllm.bench.report import Report, Row, compared, report
from fastattention_vllm.bench.sampling import Samples, in_turn
from fastattention_vllm.bench.serving import Server

HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 32, 8, 128, 1000
OUTPUT_TOKENS = 64
FOREIGN = 0.05
"""A sample is discarded if other processes took more than this part of a CPU."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, metavar="PATH", help="without it, ours is measured alone")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 8192, 32768], help="lengths of the prompts")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4], help="requests at the same time")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a model of bf16 weights, instead of the shape")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--intermediate-size", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpus", default=",".join(map(str, sorted(os.sched_getaffinity(0)))), help="as in 0,1")
    parser.add_argument("--enforce-eager", action="store_true", help="both servers without torch.compile")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    if options.peer_python and not os.access(options.peer_python, os.X_OK):
        parser.error(f"--peer-python {options.peer_python} cannot be run.")
    if options.json:
        options.json.open("a").close()  # fails now, and not after ten minutes of measuring
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("serve_cpu: ended by a signal."))  # the servers end with it
    try:
        found = measure(options)
    except (serving.ServerError, ValueError) as error:
        print(f"serve_cpu: {error}", file=sys.stderr)
        return 1
    for row in found.rows:
        print_row(row)
    if options.json:
        found.write(options.json)
    return 0


def measure(options: argparse.Namespace) -> Report[Row]:
    peer_version = version_of(options.peer_python) if options.peer_python else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.model is None:
            say("writing the model ...")
            write_model(folder / "model", options)
        model = options.model.absolute() if options.model else folder / "model"
        servers = start(folder, model, options)
        try:
            prompts = draw_prompts(model, options)
            prefill = read_prompts(servers, prompts)
            samples = take_turns(servers, prompts, options)
        finally:
            for server in servers:
                server.stop()
        attention = {} if options.model else attention_seconds(folder, options)
    threads = len(options.cpus.split(","))
    shape = model.name if options.model else f"({HEADS},{KV_HEADS},{HEAD_SIZE}) {options.layers} layers"
    rows = [prefill_row(tokens, times, shape, threads, options) for tokens, times in prefill.items()]
    rows += [
        make_row(case, times, attention.get((case.tokens, case.batch)), shape, threads, options)
        for case, times in samples.items()
    ]
    versions = machine.versions() | ({"peer vllm": peer_version} if peer_version else {})
    return report(rows, machine.hardware(threads), versions)


def write_model(path: Path, options: argparse.Namespace) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * HEAD_SIZE,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=1 << 18,
        rope_theta=500000.0,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    words = models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(path)


def start(folder: Path, model: Path, options: argparse.Namespace) -> list[Server]:
    """Start ours, then the peer, with the same model, options and CPUs. They start in sequence, so that each compiles
    undisturbed.
    """
    longest = max(options.tokens) + OUTPUT_TOKENS
    all_tokens = sum(tokens + OUTPUT_TOKENS for tokens in options.tokens) * max(options.batch)
    cache_bytes = all_tokens * kv_bytes_per_token(model)
    arguments = ["-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "model"]
    arguments += ["--dtype", "bfloat16", "--max-model-len", str(longest), "--max-num-seqs", str(max(options.batch))]
    arguments += ["--enable-prefix-caching", "--seed", "0", *(["--enforce-eager"] if options.enforce_eager else [])]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VLLM_PLUGINS")}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": options.cpus,
        "VLLM_CPU_KVCACHE_SPACE": str(-(-cache_bytes * 5 // 4 // 2**30)),
    }
    ours = [sys.executable, *arguments, "--attention-backend", "fastattention"]
    commands = {"ours": ours}
    if options.peer_python:
        commands["peer"] = [str(options.peer_python.absolute()), *arguments]
    servers: list[Server] = []
    try:
        for name, command in commands.items():
            say(f"starting {name} ...")
            servers.append(Server(name, command, environment, folder / f"{name}.log"))
            servers[-1].wait_until_healthy()
    except BaseException:
        for server in servers:
            server.stop()
        raise
    return servers


def kv_bytes_per_token(model: Path) -> int:
    config = json.loads((model / "config.json").read_text())
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    return int(config["num_hidden_layers"]) * 2 * int(heads) * int(head_size) * 2


class Case(NamedTuple):
    tokens: int
    batch: int
    temperature: float


class Times(NamedTuple):
    """Of one server in one case: wall and CPU seconds from one token of all prompts to the next."""

    wall: Samples
    cpu: list[float]


def draw_prompts(model: Path, options: argparse.Namespace) -> dict[int, list[list[int]]]:
    dice, vocabulary = random.Random(0), json.loads((model / "config.json").read_text())["vocab_size"]
    return {
        tokens: [[dice.randrange(1, vocabulary) for _ in range(tokens)] for _ in range(max(options.batch))]
        for tokens in options.tokens
    }


def read_prompts(servers: list[Server], prompts: dict[int, list[list[int]]]) -> dict[int, dict[str, Samples]]:
    """Seconds to the first token of each prompt, which no cache holds before."""
    times = {tokens: {server.name: Samples() for server in servers} for tokens in prompts}
    for tokens, some in prompts.items():
        for number, prompt in enumerate(some):
            for server in in_turn(servers, number):
                with undisturbed(servers, times[tokens][server.name]) as put:
                    begun = time.perf_counter()
                    put(server.stream(prompt, 1)[0][0] - begun)
                say(f"{server.name}: a prompt of {tokens} tokens read")
    return times


def take_turns(
    servers: list[Server], prompts: dict[int, list[list[int]]], options: argparse.Namespace
) -> dict[Case, dict[str, Times]]:
    cases = [
        Case(tokens, batch, temperature)
        for tokens in options.tokens
        for batch in options.batch
        for temperature in options.temperature
    ]
    times = {case: {server.name: Times(Samples(), []) for server in servers} for case in cases}
    for number in range(options.rounds):
        for case in cases:
            for server in in_turn(servers, number):
                wall, cpu = times[case][server.name]
                before = server.cpu_seconds()
                with undisturbed(servers, wall) as put:
                    put(server.decode(prompts[case.tokens][: case.batch], OUTPUT_TOKENS, case.temperature))
                cpu.append((server.cpu_seconds() - before) / OUTPUT_TOKENS)
        say(f"round {number + 1} of {options.rounds}")
    return times


@contextlib.contextmanager
def undisturbed(servers: list[Server], samples: Samples) -> Iterator[Callable[[float], None]]:
    """Gives a function that takes the sample. It counts as clean unless other processes took a part of a CPU."""

    def used() -> tuple[float, float, float]:
        ours = serving.own_cpu_seconds() + sum(each.cpu_seconds() for each in servers)
        return serving.machine_cpu_seconds(), ours, time.perf_counter()

    found: list[float] = []
    before = used()
    yield found.append
    share = serving.foreign_share(*(after - earlier for after, earlier in zip(used(), before, strict=True)))
    (samples.disturbed if share > FOREIGN else samples.clean).extend(found)


def attention_seconds(folder: Path, options: argparse.Namespace) -> dict[tuple[int, int], float]:
    """The time of our kernel in one step, all layers, measured alone while no server runs."""
    cases = {
        f"decode bf16 ({HEADS},{KV_HEADS},{HEAD_SIZE}) {tokens} b{batch}": (tokens, batch)
        for tokens in options.tokens
        for batch in options.batch
    }
    out = folder / "kernel.json"
    command = [sys.executable, "-m", "fastattention_vllm.cli", "bench", "cpu", "--contender", "ours"]
    command += ["--threads", str(len(options.cpus.split(","))), "--rounds", "3", "--json", str(out)]
    command += [part for case in cases for part in ("--case", case)]
    say("timing the kernel alone ...")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise serving.ServerError(f"the kernel benchmark failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    rows = json.loads(out.read_text())["rows"]
    return {case: row["milliseconds"] / 1e3 * options.layers for case, row in zip(cases.values(), rows, strict=True)}


def make_row(
    case: Case,
    times: dict[str, Times],
    attention: float | None,
    shape: str,
    threads: int,
    options: argparse.Namespace,
) -> Row:
    ours, peer = times["ours"], times.get("peer")
    sampled = f" temperature {case.temperature:g}" if case.temperature else ""
    return compared(
        f"bf16 {shape} {length_of(case.tokens)} b{case.batch}{sampled}",
        "serve inter-token latency",
        "ms",
        ours.wall.median * 1e3,
        better="lower",
        **measured({name: each.wall for name, each in times.items()}, threads, options, 1e3),
        cpu_ms=statistics.median(ours.cpu) * 1e3,
        peer_cpu_ms=statistics.median(peer.cpu) * 1e3 if peer else None,
        attention_ms=None if attention is None else attention * 1e3,
        attention_share=None if attention is None else attention / ours.wall.median,
    )


def prefill_row(tokens: int, times: dict[str, Samples], shape: str, threads: int, options: argparse.Namespace) -> Row:
    return compared(
        f"bf16 {shape} {length_of(tokens)} b1",
        "serve time to first token",
        "ms",
        times["ours"].median * 1e3,
        better="lower",
        **measured(times, threads, options, 1e3),
    )


def measured(times: dict[str, Samples], threads: int, options: argparse.Namespace, unit: float) -> dict[str, Any]:
    ours, peer = times["ours"], times.get("peer")
    return {
        "peer_name": "vLLM CPU_ATTN" if peer else None,
        "peer": peer.median * unit if peer else None,
        "threads": threads,
        "compiled": not options.enforce_eager,
        "iqr": ours.iqr,
        "peer_iqr": peer.iqr if peer else None,
        "samples": len(ours.clean),
        "peer_samples": len(peer.clean) if peer else None,
        "reliable": all(samples.clean for samples in times.values()),
    }


def length_of(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def print_row(row: Row) -> None:
    text = f"{row.case:<50} {row.metric.removeprefix('serve '):<20} {row.ours:8.2f} ms"
    if getattr(row, "attention_share", None) is not None:
        text += f", attention {row.attention_share:4.0%} of it"
    if row.ratio is not None:
        loss = "  LOSS" if row.ratio < 1 else ""
        text += f"; {row.peer_name} {row.peer:8.2f} ms, ratio {row.ratio:.2f}{loss}"
    if getattr(row, "cpu_ms", None) is not None:
        text += f"; CPU {row.cpu_ms:.0f} ms"
        text += f" and {row.peer_cpu_ms:.0f} ms" if row.peer_cpu_ms is not None else ""
    print(text + ("" if row.reliable else "  (disturbed)"))


def version_of(python: Path) -> str:
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise serving.ServerError(f"{python} has no vLLM:\n{done.stderr[-1000:]}")
    return done.stdout.strip()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
