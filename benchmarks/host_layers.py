"""One request larger than the GPU's KV memory: is every needle found, and how fast is it read and answered?

    python benchmarks/host_layers.py --device-gib 4 --tokens 262144 524288 --json FILE

The model looks numbers up in its prompt and needs every layer for it (fastattention_vllm/demo), in the attention shape,
the width and the size of an 8B Llama. --device-gib caps the memory of the GPU's KV cache to play a small card. With a
prompt in the cache, the ways to decode are compared on the same pages: (b) the GPU reads all host KV over the link,
(c) the CPU attends to all of it, (d) what the start-up measurement chose. (a) is vLLM's own backend, at the contexts
that it holds in that memory. The limit of a decoding rate is a plain read of the host pool, by the same threads in the
same rounds.

    python benchmarks/host_layers.py --plot FILE.png --from FILE.json ...

draws tokens per second against context from results.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the ways are switched in the worker, which is then this process

import torch

from fastattention_vllm.attention.cpu.roofline import PageReader, ReadMethod
from fastattention_vllm.bench import machine, plots
from fastattention_vllm.bench.saved_report import saved_report
from fastattention_vllm.demo.haystack import make_haystack
from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DemoModelSpec
from fastattention_vllm.demo.tokenizer import token_id

NEEDLES = {"alpha": "7319", "beta": "2046", "gamma": "90", "delta": "5", "omega": "318"}
DEPTHS = [0.0, 0.1, 0.5, 0.9, 1.0]
SHAPES = {
    "8b": {"num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "head_size": 128}
    | {"min_hidden_size": 4096, "min_intermediate_size": 14336},
    "small": {"num_layers": 4, "num_heads": 8, "num_kv_heads": 2, "head_size": 128},
}
GIB = 1 << 30
POWERS_OF_TWO = [1 << exponent for exponent in range(14, 20)]
"""Tokens that are marked in the chart: what fits on the device is no round number."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--model", type=Path, default=Path("/tmp/fastattention-demo"), help="built there if not there")
    parser.add_argument("--device-gib", type=float, default=4)
    parser.add_argument("--host-gib", type=float, help="bound of the host pool")
    parser.add_argument("--tokens", type=int, nargs="+", default=[262144], help="of one prompt")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="for each of --tokens, or one for all")
    parser.add_argument("--chunk", type=int, default=8192, help="--max-num-batched-tokens")
    parser.add_argument("--decode", type=int, default=8, help="tokens timed in each way")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=["stock", "device", "host"], default=["stock", "host"])
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="draw --from into this PNG file, and do nothing else")
    parser.add_argument("--from", type=saved_report, nargs="+", dest="results", help="results of earlier runs")
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
    report = {
        "hardware": f"{torch.cuda.get_device_name()}, KV memory capped to {options.device_gib} GiB; "
        + machine.hardware(os.cpu_count() or 1),
        "versions": machine.versions(),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    for row in rows:
        print(json.dumps(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    missed = [row for row in rows if "needles" in row["metric"] and row["ours"] != row["limit"]]
    return 1 if missed else 0


def in_a_process_of_its_own(name: str) -> list[dict[str, Any]]:
    """An engine that ends leaves GPU memory behind in its process, one that was refused even more."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        # Of an option given twice, the last counts.
        command = [sys.executable, __file__, *sys.argv[1:], "--engines", name, "--json", file.name]
        if subprocess.run(command, check=False).returncode not in (0, 1):
            sys.exit(f"the engine {name!r} failed; its messages are above.")
        rows: list[dict[str, Any]] = json.load(file)["rows"]
    return rows


def engine(path: Path, options: argparse.Namespace, backend: str, length: int, gib: float | None, **more: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=str(path),
        attention_backend=backend,
        dtype="float16",
        max_model_len=length,
        max_num_batched_tokens=options.chunk,
        max_num_seqs=8,
        enable_prefix_caching=True,
        enforce_eager=options.enforce_eager,
        kv_cache_memory_bytes=None if gib is None else int(gib * GIB),
        gpu_memory_utilization=0.85 if gib is None else 0.5,  # where the KV cache is given, it is only a start-up check
        **more,
    )


def close(llm: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    torch.cuda.empty_cache()


def stock(path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """(a): does it start for that length, and what does it do at the longest context that fits?"""
    rows = []
    longest = max(options.tokens) + 64
    try:
        close(engine(path, options, "FLASH_ATTN", longest, options.device_gib))
        refused = False
    except (ValueError, RuntimeError) as error:
        refused = True
        print(f"vLLM's own backend at {longest} tokens: {str(error)[:300]}", flush=True)
    rows.append(row(f"{longest} tokens, vLLM alone", "cooperative starts", "1 = yes", int(not refused)))
    per_token = 2 * 2 * SHAPES[options.shape]["num_layers"] * SHAPES[options.shape]["num_kv_heads"]
    per_token *= SHAPES[options.shape]["head_size"]
    fits = int(options.device_gib * GIB * 0.98) // per_token // 1024 * 1024
    contexts = [*sorted(tokens for tokens in set(options.tokens) if tokens < fits), fits]
    return rows + measure(path, options, "FLASH_ATTN", contexts, options.device_gib, "vLLM alone, KV on the device")


def all_on_device(path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The same backend with all the GPU's memory: what a card that needs no host layers would do."""
    extra = {"additional_config": {"fastattention": {"host_kv_layers": 0}}}
    return measure(path, options, "fastattention", options.tokens[:1], None, "uncapped, KV on the device", **extra)


def measure(
    path: Path,
    options: argparse.Namespace,
    backend: str,
    contexts: list[int],
    gib: float | None,
    what: str,
    **more: Any,
) -> list[dict[str, Any]]:
    llm = engine(path, options, backend, max(contexts) + 64, gib, **more)
    rows = []
    try:
        for tokens in contexts:
            seconds, found = read(llm, tokens, 1)
            case = f"fp16 (32,8,128) {tokens} tokens b1, {what}"
            rows += [
                row(case, "cooperative needles", f"of {len(NEEDLES)}", found, limit=len(NEEDLES)),
                row(case, "cooperative prefill", "tokens/s", tokens / seconds),
                row(case, "cooperative decode", "tokens/s", 1 / decode_seconds(llm, tokens, 1, options)),
            ]
    finally:
        close(llm)
    return rows


def with_host_layers(path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    from fastattention_vllm.integration.host_layers import layers as host_layers
    from fastattention_vllm.placement.host_attention import StreamSplit

    length = max(tokens * batch for tokens, batch in zip(options.tokens, options.batch, strict=True)) + 64 * max(
        options.batch
    )
    section = {"host_kv_layers": "auto"} | ({"host_kv_gib": options.host_gib} if options.host_gib else {})
    llm = engine(
        path,
        options,
        "fastattention",
        length,
        options.device_gib,
        additional_config={"fastattention": section},
    )
    rows = []
    try:
        layers = host_layers.find(llm.llm_engine.vllm_config)
        assert layers is not None
        chosen = layers.group.stream_split
        ways = (("stream all", StreamSplit(1.0)), ("CPU alone", StreamSplit(0.0)), ("auto", chosen))
        placement = layers.placement
        per_layer = placement.bytes_per_block // placement.device_size.block_size
        per_token = per_layer * len(placement.host)
        assert layers.pool is not None
        plain = plain_read(layers.pool.memory)
        for tokens, batch in zip(options.tokens, options.batch, strict=True):
            seconds, found = read(llm, tokens, batch)
            case = f"fp16 (32,8,128) {tokens} tokens b{batch}, {len(placement.host)} host layers"
            rows.append(
                row(case, "cooperative needles", f"of {batch * len(NEEDLES)}", found, limit=batch * len(NEEDLES))
            )
            rows.append(row(case, "cooperative prefill", "tokens/s", tokens * batch / seconds))
            times: dict[str, list[float]] = {}
            rates = []
            for _ in range(options.rounds):
                rates.append(plain())
                for way, split in ways:
                    layers.set_stream_split(split)
                    times.setdefault(way, []).append(decode_seconds(llm, tokens, batch, options))
            layers.set_stream_split(chosen)
            streamed = statistics.median(times["stream all"])
            limit = statistics.median(rates) / (per_token * tokens)  # of all requests, in tokens per second
            for way, split in ways:
                step = statistics.median(times[way])
                rows.append(
                    row(f"{case}, {way}", "cooperative decode", "tokens/s", batch / step, limit)
                    | {"peer_name": "stream all", "peer": batch / streamed, "ratio": streamed / step}
                    | {
                        "share": round(split.of(per_layer * tokens * batch), 3),
                        "step_ms": [round(1000 * value, 2) for value in times[way]],
                    }
                    | {"host_gb_per_s": round(per_token * tokens * batch / step / 1e9, 1)}
                    | {"plain_read_gb_per_s": [round(rate / 1e9, 1) for rate in rates]}
                )
    finally:
        close(llm)
    return rows


def plain_read(memory: torch.Tensor) -> Callable[[], float]:
    """Reads all of it and says at how many bytes per second; the way that was fastest at first."""
    page = 1 << 20
    reader = PageReader(
        [memory.data_ptr() + offset for offset in range(0, memory.nbytes - page + 1, page)],
        [page] * (memory.nbytes // page),
    )

    def rate(method: ReadMethod) -> float:
        started = time.perf_counter()
        reader.read(method)
        return reader.total_bytes / (time.perf_counter() - started)

    best = max((ReadMethod(streams=streams) for streams in (1, 2, 4)), key=rate)
    return lambda: rate(best)


def draw(path: Path, results: list[Path]) -> None:
    """Decoding speed of one request against its context, a line for each way."""
    lines: dict[str, plots.Line] = {}
    reports = [json.loads(result.read_text()) for result in results]
    for each in [each for report in reports for each in report["rows"] if each["metric"] == "cooperative decode"]:
        found = re.search(r"(\d+) tokens b1, (?:\d+ host layers, )?(.*)", each["case"])
        if found:
            lines.setdefault(found[2], []).append((float(found[1]), each["ours"]))

    def dress(axes: Any) -> None:
        plots.by_context("tokens per second, one request")(axes)
        axes.set_xticks(*zip(*((x, f"{x // 1024}K") for x in POWERS_OF_TWO), strict=True))
        axes.set_yscale("log")

    long = {name: sorted(line) for name, line in lines.items()}
    plots.save(path, f"{reports[0]['hardware']}, {reports[0]['date']}", {"decoding": long}, dress)


def prompts_of(tokens: int, batch: int) -> list[Any]:
    return [make_haystack(tokens - 2, NEEDLES, depths=DEPTHS, seed=11 + number) for number in range(batch)]


def read(llm: Any, tokens: int, batch: int) -> tuple[float, int]:
    """Seconds for all prompts, and how many needles are found in them."""
    haystacks = prompts_of(tokens, batch)
    started = time.perf_counter()
    ask(llm, [list(haystack.token_ids) for haystack in haystacks], 1)
    seconds = time.perf_counter() - started
    found = 0
    for name, value in NEEDLES.items():
        question = [token_id(f" {name}"), token_id("=")]
        answers = ask(llm, [[*haystack.token_ids, *question] for haystack in haystacks], 1)
        found += sum(answer == [token_id(value)] for answer in answers)
    print(f"{tokens} tokens x {batch}: read in {seconds:.1f} s, {found} of {batch * len(NEEDLES)} needles", flush=True)
    return seconds, found


def decode_seconds(llm: Any, tokens: int, batch: int, options: argparse.Namespace) -> float:
    """Of one step, the prompts being in the cache: the difference of a long answer and a short one."""
    prompts = [list(haystack.token_ids) for haystack in prompts_of(tokens, batch)]
    ask(llm, prompts, 1)
    taken = []
    for count in (1, 1 + options.decode):
        started = time.perf_counter()
        ask(llm, prompts, count)
        taken.append(time.perf_counter() - started)
    return (taken[1] - taken[0]) / options.decode


def ask(llm: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def row(case: str, metric: str, unit: str, ours: float, limit: float | None = None) -> dict[str, Any]:
    return {
        "case": case,
        "metric": metric,
        "unit": unit,
        "ours": round(ours, 3),
        "peer_name": None,
        "peer": None,
        "ratio": None,
        "limit": limit,
        "fraction_of_limit": None if limit is None else ours / limit,
    }


if __name__ == "__main__":
    sys.exit(main())
