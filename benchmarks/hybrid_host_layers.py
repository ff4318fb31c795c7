"""Host layers in a hybrid: one request that does not fit a small GPU, in a model with Gated DeltaNet layers.

    B="python benchmarks/hybrid_host_layers.py --reference REFERENCE"
    $B --tokens 262144 524288 --host-layers 0 8 12 --json FILE
    $B --tokens 262144 524288 --host-layers 0 8 12 --graphs --json FILE
    $B --tokens 262144 --host-layers 0 8 12 --graphs --drafts 2 --json FILE

Run by: contributors who change host layers or the plan of hybrids, and users of such models.
Needs: an NVIDIA GPU of compute capability 8.0 or newer with 40 GiB (one H100 for 524288 tokens), vLLM's CUDA build, and
28 GiB of host memory.

The model has the attention shape of Qwen3.5-27B: 48 Gated DeltaNet layers and 16 full ones of 24 query and 4 KV heads
of size 256. Its hidden size and MLPs are small, and its weights are random (hybrid_model.py).

For each number of host layers, an engine reads a prompt and decodes, with the prompt in the cache; then it does so with
the next longer one. Without host layers it has all of the GPU's memory, and its answers are the reference. With host
layers, --device-gib limits the memory of the GPU's KV cache.

Answers are compared up to the token where rounding decides between two equally good ones. How much rounding changes
them is measured with engines without host layers: one reads the prompt in steps half as long, and each one with graphs
or drafts counts. With host layers, log-probabilities may be at most twice as far from the reference as theirs are. As a
control, the same prompt is asked again after the host pool was zeroed, and the answer must differ.

Decoding with host layers is measured in three ways: all host KV over the link, the CPU alone, and as chosen at start.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hybrid_model import TINY, VOCAB, Shape, build

from fastattention_vllm.bench import machine
from fastattention_vllm.bench.report import Report, Row, compared, report

# Host layers are switched and read in the worker, which is then this process.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

GIB = 1 << 30
ALLOWED = 2**-4
"""Tolerance of log-probabilities where rounding changes them less: 64 steps of an fp16 logit between 1 and 2."""
LEAST_SECONDS = 45
"""An engine needs at least this long."""
CANDIDATES = 5
Steps = list[tuple[int, dict[int, float]]]
"""The tokens of an answer, each with the log-probabilities of the most likely tokens in its place."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("/tmp/fastattention-hybrid"), help="built there if missing")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[262144], help="lengths of prompts, the shortest first"
    )
    parser.add_argument("--host-layers", type=int, nargs="+", default=[0, 8, 12], help="one engine each; 0 first")
    parser.add_argument("--device-gib", type=float, default=9, help="KV cache of the GPU beside host layers")
    parser.add_argument("--chunk", type=int, default=8192, help="--max-num-batched-tokens")
    parser.add_argument("--decode", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--graphs", action="store_true", help="torch.compile and CUDA graphs instead of eager mode")
    parser.add_argument("--drafts", type=int, default=0, help="tokens that the model's MTP layer drafts in a step")
    parser.add_argument("--limit-s", type=float, default=3600, help="engines that would end later are not run")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a test without a GPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--reference", type=Path, help="keeps the reference for further runs; else it ends with this one"
    )
    parser.add_argument("--one-engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = TINY if options.tiny else Shape()
    if not options.model.exists():
        started = time.perf_counter()
        build(options.model, shape, "cuda" if torch.cuda.is_available() else "cpu")
        print(f"model built in {time.perf_counter() - started:.0f} s", flush=True)
    rows = measure(shape, options) if options.one_engine else in_processes_of_their_own(options)
    save(rows, options)
    failed = [row for row in rows if row.unit == "1 = yes" and not row.ours]
    for row in failed:
        print(f"WRONG: {row.case}: {row.metric}", flush=True)
    return 1 if failed else 0


def save(rows: list[Row], options: argparse.Namespace) -> None:
    if options.json:
        hardware = machine.hardware(len(os.sched_getaffinity(0)))
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        report(rows, f"{gpu}, KV memory beside host layers {options.device_gib} GiB; {hardware}").write(options.json)


def in_processes_of_their_own(options: argparse.Namespace) -> list[Row]:
    """An engine leaves GPU memory behind. Together they take at most ``--limit-s``."""
    end = time.monotonic() + options.limit_s
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        file, reference = Path(folder) / "rows.json", options.reference or Path(folder) / "reference.json"
        for host, chunk in runs_of(options, known=reference.exists()):
            left = end - time.monotonic()
            if left < LEAST_SECONDS:
                print(f"{host} host layers: not run, because {left:.0f} s are left of --limit-s", flush=True)
                continue
            # The last value of a repeated option applies.
            command = [sys.executable, __file__, *sys.argv[1:], "--host-layers", str(host)]
            command += ["--chunk", str(chunk), "--reference", str(reference), "--json", str(file), "--one-engine"]
            try:
                status = subprocess.run(command, check=False, timeout=left).returncode
            except subprocess.TimeoutExpired:
                print(f"{host} host layers: ended after --limit-s", flush=True)
            else:
                if status not in (0, 1):
                    print(f"{host} host layers: the engine failed; its messages are above", flush=True)
                    rows.append(row(f"{host} host layers", "cooperative runs", "1 = yes", 0))
            if file.exists():  # with the rows of all prompts that the engine has answered
                rows += Report[Row].model_validate_json(file.read_text()).rows
                file.unlink()
            save(rows, options)
    return rows


def runs_of(options: argparse.Namespace, *, known: bool) -> list[tuple[int, int]]:
    """For each engine, its host layers and --chunk. The first one writes the reference, unless it is ``known``."""
    runs = [(host, options.chunk) for host in options.host_layers]
    again = [] if known or options.host_layers[0] else [(0, options.chunk // 2)]
    return [*runs[:1], *again, *runs[1:]]


def measure(shape: Shape, options: argparse.Namespace) -> list[Row]:
    """The rows of one engine, which are also printed."""
    (host,) = options.host_layers
    started = time.perf_counter()
    llm = engine(host, shape, options)
    print(f"{host} host layers: started in {time.perf_counter() - started:.0f} s", flush=True)
    rows: list[Row] = []
    longest = random_prompt(max(options.tokens))
    for tokens in sorted(options.tokens):
        rows += with_prompt(llm, longest[:tokens], host, shape, options)
        save(rows, options)
    return rows


def with_prompt(llm: Any, prompt: list[int], host: int, shape: Shape, options: argparse.Namespace) -> list[Row]:
    """The rows of a prompt that begins with what the engine has read before."""
    rows: list[Row] = []
    layers_of_kinds = f"{len(shape.full)} full of {shape.layers} layers"
    form = ("graphs" if options.graphs else "eager") + (f", {options.drafts} drafts of MTP" if options.drafts else "")
    case = f"fp16 ({layers_of_kinds}) {len(prompt)} tokens, {form}, {host} host layers"

    def add(what: str, metric: str, unit: str, ours: float, **more: Any) -> None:
        rows.append(row(case + what, metric, unit, ours, **more))
        print(rows[-1].model_dump_json(exclude_none=True), flush=True)

    started = time.perf_counter()
    first, cached = ask(llm, prompt, 1)
    add("", "cooperative prefill", "tokens/s", (len(prompt) - cached) / (time.perf_counter() - started), cached=cached)
    answer = ask_again(llm, prompt, 1 + options.decode)
    print("answer", answer, flush=True)
    add("", "cooperative cached prompt has the same answer", "1 = yes", int(agree(first, answer[:1])))
    reference = Reference.load(options.reference, len(prompt))
    steps = "" if reference is None else f", steps of {options.chunk} tokens"
    if not host and reference is None:
        Reference(answer).save(options.reference, len(prompt))
    elif not host and reference is not None:
        apart = distance(answer, reference.answer)
        replace(reference, rounding=max(reference.rounding, apart)).save(options.reference, len(prompt))
        add(steps, "cooperative distance from the reference", "nats", apart)
    if not host:
        seconds = [decode_seconds(llm, prompt, options) for _ in range(options.rounds)]
        add(steps, "cooperative decode", "tokens/s", 1 / statistics.median(seconds), step_ms=in_ms(seconds))
        return rows
    layers = host_layers_of(llm)
    size = layers.placement.device_size
    add("", "cooperative blocks", "tokens", size.block_size, tables=size.groups(), layers=list(layers.placement.host))
    if reference is not None:
        same = sum(ours[0] == theirs[0] for ours, theirs in zip(answer, reference.answer, strict=True))
        apart, allowed = distance(answer, reference.answer), reference.allowed()
        numbers = {"same_tokens": same, "distance": round(apart, 4), "allowed": round(allowed, 4)}
        add("", "cooperative answer is the reference's", "1 = yes", int(apart <= allowed), **numbers)
    decode_with_host_layers(llm, prompt, shape, options, add)
    if len(prompt) == max(options.tokens):
        layers.pool.memory.zero_()
        without = ask_again(llm, prompt, 1 + options.decode)
        add("", "cooperative answer needs the pool", "1 = yes", int(not agree(without, answer)))
    return rows


def decode_with_host_layers(llm: Any, prompt: list[int], shape: Shape, options: argparse.Namespace, add: Any) -> None:
    from fastattention_vllm.placement.stream_split import StreamSplit

    layers = host_layers_of(llm)
    chosen = layers.group.stream_split
    ways = {"stream all": StreamSplit(1.0), "CPU alone": StreamSplit(0.0), "auto": chosen}
    times: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for way, split in ways.items():
            layers.set_stream_split(split)
            times.setdefault(way, []).append(decode_seconds(llm, prompt, options))
    layers.set_stream_split(chosen)
    read = shape.kv_bytes * len(prompt)
    link = statistics.median(times["stream all"])
    for way, split in ways.items():
        step = statistics.median(times[way])
        of_link = {"peer_name": "stream all", "peer": 1 / link}
        share = {"share": round(split.of(read), 3), "step_ms": in_ms(times[way])}
        rate = round(read * len(layers.placement.host) / step / 1e9, 1)
        add(f", {way}", "cooperative decode", "tokens/s", 1 / step, **of_link, **share, host_gb_per_s=rate)


def engine(host: int, shape: Shape, options: argparse.Namespace) -> Any:
    from vllm import LLM

    capped = {"kv_cache_memory_bytes": int(options.device_gib * GIB), "gpu_memory_utilization": 0.5}
    drafts = (
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": options.drafts}} if options.drafts else {}
    )
    return LLM(
        model=str(options.model),
        attention_backend="fastattention",
        dtype="float16",
        # States in fp32, as Qwen3.5 has them.
        mamba_ssm_cache_dtype="float32",
        # FlashInfer's kernel is compiled when it first runs.
        additional_config={"gdn_prefill_backend": "triton", "fastattention": {"host_kv_layers": host}},
        max_model_len=max(options.tokens) + 4 * options.decode,
        max_num_batched_tokens=options.chunk,
        max_num_seqs=4,
        enable_prefix_caching=True,
        enforce_eager=not options.graphs,
        skip_tokenizer_init=True,
        seed=0,
        **(capped if host or options.tiny else {"gpu_memory_utilization": 0.85}),
        **drafts,
    )


def host_layers_of(llm: Any) -> Any:
    from fastattention_vllm.integration.host_layers import layers as host_layers

    found = host_layers.find(llm.llm_engine.vllm_config)
    assert found is not None
    assert found.pool is not None
    return found


def random_prompt(tokens: int) -> list[int]:
    numbers: list[int] = torch.randint(2, VOCAB, (tokens,), generator=torch.Generator().manual_seed(3)).tolist()
    return numbers


def ask(llm: Any, prompt: list[int], count: int) -> tuple[Steps, int]:
    """The answer of ``count`` tokens, and how many tokens of the prompt were in the cache."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=count, logprobs=CANDIDATES, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    found = output.outputs[0]
    steps = [
        (token, {one: entry.logprob for one, entry in step.items()})
        for token, step in zip(found.token_ids, found.logprobs, strict=True)
    ]
    return steps, output.num_cached_tokens or 0


def ask_again(llm: Any, prompt: list[int], count: int) -> Steps:
    """The answer to a prompt that the engine has read.

    Raises:
        RuntimeError: it is not in the cache, so a time would be that of reading it.
    """
    steps, cached = ask(llm, prompt, count)
    if cached < len(prompt) * 3 // 4:
        raise RuntimeError(f"only {cached} of {len(prompt)} tokens are cached; decoding is not timed.")
    return steps


@dataclass(frozen=True)
class Reference:
    """What engines with host layers should answer."""

    answer: Steps
    rounding: float = 0.0
    """How far another order of rounding is from it."""

    def allowed(self) -> float:
        return max(ALLOWED, 2 * self.rounding)

    def save(self, file: Path, tokens: int) -> None:
        found = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(found | {str(tokens): [self.answer, self.rounding]}))

    @classmethod
    def load(cls, file: Path, tokens: int) -> Reference | None:
        """For a prompt of ``tokens``; None where no engine has answered it."""
        found = json.loads(file.read_text()).get(str(tokens)) if file.exists() else None
        if found is None:
            return None
        answer, rounding = found
        # The keys of JSON are strings.
        steps = [(token, {int(one): logprob for one, logprob in step.items()}) for token, step in answer]
        return cls(steps, rounding)


def agree(answer: Steps, other: Steps) -> bool:
    return distance(answer, other) <= ALLOWED


def distance(answer: Steps, other: Steps) -> float:
    """The largest difference of log-probabilities, up to the token where rounding decides between two good ones."""
    largest = 0.0
    for (token, ours), (wanted, theirs) in zip(answer, other, strict=True):
        apart = [abs(ours.get(one, -math.inf) - theirs.get(one, -math.inf)) for one in (token, wanted)]
        largest = max(largest, *apart)
        if token != wanted:
            break
    return largest


def decode_seconds(llm: Any, prompt: list[int], options: argparse.Namespace) -> float:
    """Seconds of a token with the prompt in the cache: the difference of a long answer and a short one."""
    taken = []
    for count in (1, 1 + options.decode):
        started = time.perf_counter()
        ask_again(llm, prompt, count)
        taken.append(time.perf_counter() - started)
    return (taken[1] - taken[0]) / options.decode


def in_ms(seconds: list[float]) -> list[float]:
    return [round(1000 * value, 2) for value in seconds]


def row(case: str, metric: str, unit: str, ours: float, **more: Any) -> Row:
    return compared(case, metric, unit, ours, better="lower" if unit == "nats" else "higher", **more)


if __name__ == "__main__":
    sys.exit(main())
