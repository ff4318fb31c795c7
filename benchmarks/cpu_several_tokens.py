"""CPU attention for several new tokens of a request, as in speculation, beside one token and beside prefill.

    python benchmarks/cpu_several_tokens.py --json FILE
    python benchmarks/cpu_several_tokens.py --heads 32,8,128 --dtypes bf16 --contexts 65536 --tokens 2 4 8

Run by: contributors who change the CPU kernels.
Needs: a CPU, and memory for two layers of the longest context.

One call reads the context once for all of its tokens. Each call reads another layer than the call before, of so many
that they are twice as large as the last-level cache, as a model's layers are. The peer is a call per token. The limit
is the rate of multiply-adds that a chunk of a prompt reaches: 2048 query rows per KV head on a context of 4096 tokens.
Calls take turns within one process. With one thread (the default) times are the thread's CPU time, because it depends
little on what else runs on the machine; with more threads they are wall time. Ratios are medians over the rounds of
what was measured in the same round.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.bench import machine
from fastattention_vllm.bench.cases import DTYPES
from fastattention_vllm.bench.report import Row, compared, report
from fastattention_vllm.bench.sampling import in_turn
from fastattention_vllm.placement.step import MAX_CPU_TOKENS

PAGE = 128
HEADS = ["32,8,128", "28,4,128", "16,16,96", "32,2,128"]
PREFILL_ROWS, PREFILL_CONTEXT = 2048, 4096


class Call:
    """``tokens`` new tokens at the end of ``context``, in pages of a layer's shuffled cache."""

    def __init__(
        self, dtypes: str, heads: tuple[int, int, int], context: int, tokens: int, layers: Sequence[torch.Tensor]
    ) -> None:
        query_dtype, _, kv_dtype = dtypes.partition("/")
        self.heads, self.kv_heads, self.size = heads
        self.context, self.tokens = context, tokens
        pages = -(-context // PAGE)
        query = torch.randn(tokens, self.heads, self.size).to(DTYPES[query_dtype])
        table = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).to(torch.int32)[None]
        self.problems = []
        for cache in layers:
            key, value = cache.view(DTYPES[kv_dtype or query_dtype]).transpose(1, 2).chunk(2, dim=-1)
            self.problems.append(
                AttentionProblem(
                    query=query,
                    key=key,
                    value=value,
                    query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
                    seq_lens=torch.tensor([context], dtype=torch.int32),
                    scale=self.size**-0.5,
                    causal=True,
                    block_table=table,
                )
            )
        self.out = torch.empty_like(query)

    @property
    def gigaflop(self) -> float:
        """Of the two products, over the keys that each token sees."""
        seen = self.tokens * self.context - self.tokens * (self.tokens - 1) // 2
        return 4e-9 * self.size * self.heads * seen

    def seconds(self, clock: Any, layer: int) -> float:
        problem = self.problems[layer % len(self.problems)]
        began: float = clock()
        cpu.run(problem, out=self.out)
        return float(clock()) - began


def layers_of(heads: tuple[int, int, int], dtypes: str, context: int) -> list[torch.Tensor]:
    """Caches that are twice as large as the last-level cache together, two at least."""
    one = cache_of(heads, dtypes, context)
    more = max(2, -(-2 * machine.last_level_cache() // one.nbytes)) - 1
    return [one, *(one.clone() for _ in range(more))]


def cache_of(heads: tuple[int, int, int], dtypes: str, context: int) -> torch.Tensor:
    """As bytes: one page of random numbers, repeated."""
    _, kv_heads, size = heads
    dtype = DTYPES[dtypes.rpartition("/")[2]]
    page = torch.randn(1, kv_heads, PAGE, 2 * size).to(dtype).view(torch.uint8)
    return page.repeat(-(-context // PAGE), 1, 1, 1)


def measure(heads: tuple[int, int, int], dtypes: str, context: int, options: argparse.Namespace) -> list[Row]:
    layers = layers_of(heads, dtypes, context)
    calls = {tokens: Call(dtypes, heads, context, tokens, layers) for tokens in (1, *options.tokens)}
    few_heads = (heads[0] // heads[1], 1, heads[2])
    chunk = PREFILL_ROWS // few_heads[0]
    prefill = Call(dtypes, few_heads, PREFILL_CONTEXT, chunk, [cache_of(few_heads, dtypes, PREFILL_CONTEXT)])
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    times: dict[int, list[float]] = {tokens: [] for tokens in (*calls, 0)}
    layer = itertools.count()
    for turn in range(-1, options.rounds):
        for tokens, call in in_turn([*calls.items(), (0, prefill)], turn):
            taken = call.seconds(clock, next(layer))
            if turn >= 0:  # the first round touches the caches
                times[tokens].append(taken)
    rows = []
    for tokens in options.tokens:
        rate = calls[tokens].gigaflop / statistics.median(times[tokens])
        rates = [calls[tokens].gigaflop / seconds for seconds in times[tokens]]
        one, whole = ratios(rates, times[1], calls[1].gigaflop), ratios(rates, times[0], prefill.gigaflop)
        rows.append(
            compared(
                f"decode {dtypes} ({','.join(map(str, heads))}) {context // 1024}K b1, {tokens} tokens",
                "decode several tokens",
                "GFLOP/s",
                rate,
                better="higher",
                peer_name="a call per token",
                peer=rate / one,
                limit=rate / whole,
                rows_per_kv_head=tokens * heads[0] // heads[1],
                times_one_token=calls[tokens].gigaflop / calls[1].gigaflop / one,
                threads=options.threads,
                isa=cpu.isa(),
            )
        )
        print(rows[-1].model_dump_json(), flush=True)
    return rows


def ratios(rates: list[float], seconds: list[float], gigaflop: float) -> float:
    """The median of ``rates`` over those of another call in the same rounds."""
    return statistics.median(rate * taken / gigaflop for rate, taken in zip(rates, seconds, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=HEADS, help="query heads, KV heads, head size")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp16", "bf16/fp8"], help="of queries/of the cache")
    parser.add_argument("--contexts", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2, 4, 8], choices=range(2, MAX_CPU_TOKENS + 1))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    cpu.set_num_threads(options.threads)
    rows = []
    for text in options.heads:
        heads, kv_heads, size = map(int, text.split(","))
        for dtypes in options.dtypes:
            for context in options.contexts:
                rows += measure((heads, kv_heads, size), dtypes, context, options)
    if options.json:
        report(rows, machine.hardware(options.threads)).write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
