"""What host layers lose and gain by storing 8 bits: errors of attention and of log-probabilities, needles, and speed.

    python benchmarks/host_kv_dtypes.py --json FILE
    python benchmarks/host_kv_dtypes.py --only speed --cpu-time     # on a machine that other programs use

Run by: contributors who change 8-bit rows, and users who choose `host_kv_dtype`.
Needs: transformers, which vLLM brings. 16-bit means bf16, and the 16-bit host cache is the peer.

- attention: one decoded token over random keys and values, against float64 over the keys before any rounding. Outlier
  channels are as models with biased keys have them: these channels of every key are 10 or 30 times as large as others.
- log-probabilities: a random Qwen2 of four layers in transformers, whose key biases make such channels. The keys and
  values of three layers are rounded as host layers do. (tests/integration/host_layers/test_host_kv_dtype.py shows that
  an engine computes the same.) Every log-probability of a prompt of 512 random tokens, beside unrounded fp32.
- needles: the demo model in transformers, all layers but one rounded.
- speed: attention of one token over 32,768 tokens, with 4 and 8 query heads per KV head, each dtype in turn, round by
  round. The limit is a plain read of the same bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.bench import machine
from fastattention_vllm.bench.report import Row, compared, report
from fastattention_vllm.demo.haystack import make_haystack
from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DemoModelSpec
from fastattention_vllm.demo.tokenizer import token_id
from fastattention_vllm.placement.calibrate import plain_read_rate
from fastattention_vllm.placement.stored_rows import TORCH_DTYPES, page_shape, pages_of, rounded, token_bytes

BF16, PEER = torch.bfloat16, "16-bit host cache"
DTYPES = {"bf16": BF16} | TORCH_DTYPES
HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 128, 128
SPEED_HEADS = (32, 64)
OUTLIERS = ((0, 1), (2, 10), (2, 30), (4, 10), (4, 30))
"""Channels of 128, and how many times as large they are."""
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PARTS = ("attention", "speed", "logprobs", "needles")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=32768, help="context of the speed rows")
    parser.add_argument("--needle-tokens", type=int, default=2000)
    parser.add_argument("--cpu-time", action="store_true", help="speed by CPU time; needs --threads 1")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.cpu_time and options.threads != 1:
        print("host_kv_dtypes: --cpu-time counts one thread; pass --threads 1.", file=sys.stderr)
        return 2
    cpu.set_num_threads(options.threads)
    rows: list[Row] = []
    clock = "CPU time of one thread" if options.cpu_time else "wall-clock time"
    for part in options.only:
        measures: dict[str, Callable[[], Iterator[Row]]] = {
            "attention": attention_errors,
            "logprobs": logprob_differences,
            "needles": lambda: needles(options.needle_tokens),
            "speed": lambda: speeds(options.tokens, options.rounds, options.cpu_time),
        }
        for row in measures[part]():
            rows.append(row)
            peer = "" if row.peer is None else f" ({PEER}: {row.peer:.3g})"
            ratio = "" if row.ratio is None else f", ratio {row.ratio:.2f}"
            print(f"{row.case}: {row.metric} {row.ours:.3g} {row.unit}{peer}{ratio}", flush=True)
        if options.json:  # after each part, so that an interrupted run keeps what it has
            report(rows, machine.hardware(options.threads), isa=cpu.isa(), clock=clock).write(options.json)
    return 0


class Cache:
    """Random keys and values of one layer, stored in each dtype in turn."""

    def __init__(self, tokens: int, channels: int = 0, times: int = 1, heads: int = HEADS) -> None:
        random = torch.Generator().manual_seed(0)
        self.tokens, self.blocks = tokens, -(-tokens // PAGE)
        self.key, self.value = torch.randn(2, tokens, KV_HEADS, SIZE, generator=random).to(BF16)
        for channel in range(channels):
            self.key[..., 11 + 29 * channel] += times * (-1) ** channel
        self.query = torch.randn(1, heads, SIZE, generator=random).to(BF16)

    def problem(self, dtype: torch.dtype) -> AttentionProblem:
        pages = pages_of(torch.zeros(page_shape(self.blocks, KV_HEADS, PAGE, SIZE, dtype), dtype=dtype))
        slots = torch.arange(self.tokens)
        cpu.write_kv(self.key, self.value, pages.key, pages.value, slots, factors=pages.factors)
        key_factors, value_factors = pages.factors or (None, None)
        return AttentionProblem(
            query=self.query,
            key=pages.key,
            value=pages.value,
            key_factors=key_factors,
            value_factors=value_factors,
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([self.tokens], dtype=torch.int32),
            block_table=torch.arange(self.blocks, dtype=torch.int32)[None],
            scale=SIZE**-0.5,
            causal=True,
        )

    def exact(self) -> torch.Tensor:
        query = self.query[0].double().view(KV_HEADS, HEADS // KV_HEADS, SIZE)
        weights = torch.einsum("kgd,tkd->kgt", query, self.key.double()).mul(SIZE**-0.5).softmax(-1)
        return torch.einsum("kgt,tkd->kgd", weights, self.value.double()).reshape(1, HEADS, SIZE)


def attention_errors(tokens: int = 8192) -> Iterator[Row]:
    for channels, times in OUTLIERS:
        cache = Cache(tokens, channels, times)
        exact = cache.exact()
        errors = {}
        for name, dtype in DTYPES.items():
            # fp32 queries, so that what is left is the cache's rounding alone.
            problem = cache.problem(dtype)
            out = cpu.run(replace(problem, query=problem.query.float()))[0].double()
            errors[name] = float((out - exact).abs().max() / exact.abs().max())
        for name, error in errors.items():
            yield compared(
                f"{name} ({HEADS},{KV_HEADS},{SIZE}) {tokens // 1024}K, {channels} outlier channels of {times}x",
                "decode largest error of attention",
                "of the largest output",
                error,
                better="lower",
                peer_name=PEER,
                peer=errors["bf16"],
            )


def rounding_attention(dtype: torch.dtype | None, host_layers: Collection[int]) -> str:
    """Register attention over keys and values as host layers of that dtype return them; its name in transformers."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **named: Any
    ) -> Any:
        if dtype is not None and module.layer_idx in host_layers:
            rows = [part[0].transpose(0, 1) for part in (key, value)]
            stored = rounded(rows[0], rows[1], dtype, (1.0, 1.0)).widened(key.dtype, (1.0, 1.0))
            key, value = (part.transpose(0, 1)[None] for part in stored)
        return sdpa_attention_forward(module, query, key, value, *more, **named)

    name = f"rounded_{dtype}".replace(".", "_")
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


@torch.inference_mode()
def logprobs(model: Any, attention: str, tokens: Sequence[int]) -> torch.Tensor:
    """Of every next token, fp32 ``[len(tokens), vocabulary]``."""
    model.set_attn_implementation(attention)
    found: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0].float().log_softmax(-1)
    return found


def logprob_differences(tokens: int = 512) -> Iterator[Row]:
    host = range(1, 4)
    for channels, times in OUTLIERS[::2]:
        model = random_model(channels, times)
        prompt = torch.randint(8, 1000, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
        found = {
            name: logprobs(model, rounding_attention(dtype, host), prompt)[range(tokens - 1), prompt[1:]]
            for name, dtype in ({"16-bit": None} | TORCH_DTYPES).items()
        }
        for name in TORCH_DTYPES:
            differences = (found[name] - found["16-bit"]).abs()
            case = f"{name}, random Qwen2, {channels} outlier channels of {times}x"
            for what, value in (("mean", differences.mean()), ("largest", differences.max())):
                yield compared(
                    case, f"prefill {what} difference of log-probabilities", "nats", float(value), better="lower"
                )


def random_model(channels: int, times: int) -> Any:
    """Four layers with 8 query heads and 2 KV heads of 128. Outliers are key biases, before RoPE."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=1024,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    model = Qwen2ForCausalLM(config).eval()
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias.data.zero_().view(2, SIZE)
        typical = 0.05 * 1024**0.5  # of a key's number, after a norm
        for channel in range(channels):
            bias[:, SIZE - 1 - 7 * channel] = times * typical * (-1) ** channel  # slow frequencies of RoPE
    return model


def needles(tokens: int) -> Iterator[Row]:
    spec = DemoModelSpec(num_heads=4, num_kv_heads=2, dtype="bfloat16")
    prompts = [make_haystack(tokens, {"alpha": "7319"}, depths=[d], ask="alpha").token_ids for d in DEPTHS]
    with tempfile.TemporaryDirectory() as folder:
        path = build_demo_model(Path(folder) / "demo", spec)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for name, dtype in TORCH_DTYPES.items():
        attention = rounding_attention(dtype, range(1, spec.num_layers))
        found = sum(int(logprobs(model, attention, prompt)[-1].argmax()) == token_id("7319") for prompt in prompts)
        yield compared(
            f"{name}, demo model, {tokens} tokens",
            "prefill needles found",
            f"of {len(DEPTHS)} depths",
            found,
            better="higher",
            limit=len(DEPTHS),
        )


def speeds(tokens: int, rounds: int, cpu_time: bool) -> Iterator[Row]:
    for heads in SPEED_HEADS:
        cache = Cache(tokens, heads=heads)
        for dtype in (BF16, torch.float16):
            yield from speeds_of(cache, heads, dtype, rounds, cpu_time)


def speeds_of(cache: Cache, heads: int, dtype: torch.dtype, rounds: int, cpu_time: bool) -> Iterator[Row]:
    clock = time.thread_time if cpu_time else time.perf_counter
    stored_as = DTYPES | {"bf16": dtype}
    query = cache.query.to(dtype)
    problems = {name: replace(cache.problem(stored), query=query) for name, stored in stored_as.items()}
    seconds: dict[str, list[float]] = {name: [] for name in problems}
    for _ in range(rounds):
        for name, problem in problems.items():
            began = clock()
            cpu.run(problem)
            seconds[name].append(clock() - began)
    sizes = {name: cache.tokens * KV_HEADS * token_bytes(SIZE, p.key.dtype) for name, p in problems.items()}
    # A plain read is timed by the wall clock, which other programs' work counts in.
    plain = None if cpu_time else plain_read_rate(torch.zeros(256 << 20, dtype=torch.uint8))
    label = str(dtype).removeprefix("torch.")
    for name, taken in seconds.items():
        ratios = [base / own for base, own in zip(seconds["bf16"], taken, strict=True)]
        stored = label if name == "bf16" else name
        yield compared(
            f"{stored} with {label} queries ({heads},{KV_HEADS},{SIZE}) {cache.tokens // 1024}K b1",
            "decode layers per second",
            "1/s",
            1 / statistics.median(taken),
            better="higher",
            peer_name=PEER,
            peer=1 / statistics.median(seconds["bf16"]),
            limit=None if plain is None else plain / sizes[name],
            median_ratio=statistics.median(ratios),
            gigabytes_per_second=sizes[name] / statistics.median(taken) / 1e9,
        )


if __name__ == "__main__":
    sys.exit(main())
