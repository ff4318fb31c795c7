"""Decoding with `vllm serve`, token by token, next to vLLM's own CPU build: the same model, prompts, CPUs and options.

    python benchmarks/serve_cpu.py --peer-python PATH --json FILE

Run by: users who decide between this package and vLLM's CPU build, and contributors who change a CPU path.
Needs: `make setup`, and an otherwise idle machine. PATH is the Python of an environment with a CPU build of vLLM.

Both servers run throughout and are measured in turn, one idle while the other answers. The model is a Llama shape with
random weights and few layers. Prompts are distinct and reach the servers' prefix caches before anything is timed. The
time of attention within our step is not measured inside the server: it is the kernel's own time in `fastattention bench
cpu` for the same shape, times the layers. There K and V are not in a CPU cache, so for short prompts it is an upper
bound.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
        say("writing the model ...")
        write_model(folder / "model", options)
        servers = start(folder, options)
        try:
            samples = take_turns(servers, options)
        finally:
            for server in servers:
                server.stop()
        attention = attention_seconds(folder, options)
    threads = len(options.cpus.split(","))
    rows = [
        make_row(tokens, batch, times, attention[tokens, batch], threads, options)
        for (tokens, batch), times in samples.items()
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


def start(folder: Path, options: argparse.Namespace) -> list[Server]:
    """Start ours, then the peer, with the same model, options and CPUs. They start in sequence, so that each compiles
    undisturbed.
    """
    longest = max(options.tokens) + OUTPUT_TOKENS
    all_tokens = sum(tokens + OUTPUT_TOKENS for tokens in options.tokens) * max(options.batch)
    cache_bytes = all_tokens * options.layers * 2 * KV_HEADS * HEAD_SIZE * 2
    arguments = ["-m", "vllm.entrypoints.cli.main", "serve", str(folder / "model"), "--served-model-name", "model"]
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


def take_turns(servers: list[Server], options: argparse.Namespace) -> dict[tuple[int, int], dict[str, Samples]]:
    """Seconds between tokens, by case and server."""
    dice = random.Random(0)
    prompts = {
        tokens: [[dice.randrange(1, VOCABULARY) for _ in range(tokens)] for _ in range(max(options.batch))]
        for tokens in options.tokens
    }
    for server in servers:
        for tokens in options.tokens:
            begun = time.perf_counter()
            for prompt in prompts[tokens]:
                server.stream(prompt, 1)
            seconds = time.perf_counter() - begun
            say(f"{server.name}: {len(prompts[tokens])} prompts of {tokens} tokens read in {seconds:.1f} s")
    cases = [(tokens, batch) for tokens in options.tokens for batch in options.batch]
    samples = {case: {server.name: Samples() for server in servers} for case in cases}
    for number in range(options.rounds):
        for tokens, batch in cases:
            for server in in_turn(servers, number):
                sample(server, prompts[tokens][:batch], servers, samples[tokens, batch][server.name])
        say(f"round {number + 1} of {options.rounds}")
    return samples


def sample(server: Server, prompts: list[list[int]], servers: list[Server], samples: Samples) -> None:
    def used() -> tuple[float, float, float]:
        ours = serving.own_cpu_seconds() + sum(each.cpu_seconds() for each in servers)
        return serving.machine_cpu_seconds(), ours, time.perf_counter()

    before = used()
    seconds = server.decode(prompts, OUTPUT_TOKENS)
    share = serving.foreign_share(*(after - earlier for after, earlier in zip(used(), before, strict=True)))
    (samples.disturbed if share > FOREIGN else samples.clean).append(seconds)


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
    tokens: int,
    batch: int,
    times: dict[str, Samples],
    attention: float,
    threads: int,
    options: argparse.Namespace,
) -> Row:
    ours, peer = times["ours"], times.get("peer")
    length = f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
    return compared(
        f"bf16 ({HEADS},{KV_HEADS},{HEAD_SIZE}) {options.layers} layers {length} b{batch}",
        "serve inter-token latency",
        "ms",
        ours.median * 1e3,
        better="lower",
        peer_name="vLLM CPU_ATTN" if peer else None,
        peer=peer.median * 1e3 if peer else None,
        threads=threads,
        compiled=not options.enforce_eager,
        iqr=ours.iqr,
        peer_iqr=peer.iqr if peer else None,
        samples=len(ours.clean),
        peer_samples=len(peer.clean) if peer else None,
        reliable=all(samples.clean for samples in times.values()),
        attention_ms=attention * 1e3,
        attention_share=attention / ours.median,
    )


def print_row(row: Row) -> None:
    text = f"{row.case:<36} {row.ours:8.2f} ms a token, attention {row.attention_share:4.0%} of it"
    if row.ratio is not None:
        loss = "  LOSS" if row.ratio < 1 else ""
        text += f"; {row.peer_name} {row.peer:8.2f} ms, ratio {row.ratio:.2f}{loss}"
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
