"""A whole decoder layer of an 8B or 70B model at prefill with tensor parallelism: the time that tiling-AllReduce saves.

    python benchmarks/tiling_layer.py --ranks 2 --links nvlink host --json FILE     # on GPUs of one machine
    python benchmarks/tiling_layer.py --ranks 2 --links gloo --tiny --json FILE     # anywhere

Run by: contributors who change tiling-AllReduce.
Needs: as many NVIDIA GPUs as ranks; none with `--links gloo --tiny`.

A layer is qkv_proj, causal attention, o_proj, gate_up_proj, activation, down_proj, and two sums over the ranks; norms
and rotary embeddings, which are the same in all variants, are left out. The variants:

    plain   one matmul, then one sum, as in vLLM
    linear  o_proj and down_proj in blocks of rows, as with `tiling_all_reduce: "auto"`
    full    the paper's form: attention of a block of rows, its o_proj, its sum while the next block attends; and
            gate_up_proj, activation and down_proj of a block of rows, its sum while the next block is computed

Blocks of "full" are the fastest of a few splits, which are timed first. "ms" is the median of rounds in which the
variants alternate, averaged over the ranks. "first token s" is that time multiplied by the model's number of layers:
the time to the first token without embeddings, norms and sampling. Each result is compared with the plain one.
`--ranks 1` has only the plain variant.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tiling_ranks import LINKS, Told, collectives_of, difference, join, run_all, time_row, why_not

from fastattention_vllm.bench.ranks import RankContext, leave, plain_layer
from fastattention_vllm.bench.report import Row
from fastattention_vllm.parallel import calibrate
from fastattention_vllm.parallel.layer_timer import LayerTimer
from fastattention_vllm.parallel.plan import MIN_GAIN, cut
from fastattention_vllm.parallel.tiled_linear import compute_and_sum


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int


MODELS = {"8B": Shape(32, 4096, 32, 8, 128, 14336), "70B": Shape(80, 8192, 64, 8, 128, 28672)}
TINY = Shape(1, 64, 4, 2, 16, 96)
CUTS = (
    [1, 1],
    [1] * 4,
    [1] * 8,
    [1, 2, 4],
    [1, 3, 3, 3],
    [2, 3, 4, 5],
    [3, 3, 3, 1],
    [8, 6, 4, 2, 1],
    [4, 3, 2, 1],
    [1] * 12,
)
"""Relative sizes of blocks. Later rows cost more with causal attention, so equal blocks take unequal times."""
WORST = 1e-2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=["nvlink", "host"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--collectives", nargs="+")
    parser.add_argument("--tiny", action="store_true", help="one small layer in fp32, to try the benchmark itself")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a link, after which it is ended")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if reason := why_not(options.links, options.ranks):
        print(f"tiling_layer: {reason}", file=sys.stderr)
        return 2
    complete, _ = run_all(work, describe, options)
    return 0 if complete else 1


def describe(told: Told, before: Sequence[Told]) -> Row:
    """A result in the common form. The peer is the plain variant, which is in ``before``."""
    if "note" in told:
        return Row(case=told["note"], metric="overlap note", unit="", ours=None, **told)
    case = f"{told['model']} layer, {told['tokens']} tokens, {told['ranks']} ranks, {told['link']}, {told['way']}"
    if told["way"] == "plain":
        return time_row(case, "overlap layer", told["ms"], None, None, told)
    place = ("link", "ranks", "model", "tokens")
    plain = next(one for one in before if one.get("way") == "plain" and all(one[key] == told[key] for key in place))
    return time_row(case, "overlap layer", told["ms"], plain["ms"], None, told)


def work(rank: int, folder: str, said: tuple[str, argparse.Namespace]) -> None:
    """Runs on each rank."""
    link, options = said
    context = join(rank, folder, link, options.collectives or collectives_of(link), options.ranks)
    for model, shape in {"tiny": TINY}.items() if options.tiny else [(name, MODELS[name]) for name in options.models]:
        for tokens in options.tokens:
            measure(context, Layer(shape, context, tokens), link, model, options)
    leave(context)


class Layer:
    """Weights of one rank, with random values."""

    def __init__(self, shape: Shape, context: RankContext, tokens: int) -> None:
        ranks, dtype = context.size, torch.float32 if context.device == "cpu" else torch.float16
        self.shape, self.tokens, self.context = shape, tokens, context
        self.heads, self.kv_heads = shape.heads // ranks, max(1, shape.kv_heads // ranks)
        size, wide = shape.head_size, shape.intermediate // ranks

        def matrix(outputs: int, inputs: int, spread: float) -> torch.Tensor:
            return torch.empty(outputs, inputs, dtype=dtype, device=context.device).uniform_(-spread, spread)

        def weight(outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
            return matrix(outputs, inputs, gain * (3 / inputs) ** 0.5)

        self.qkv_weight = weight((self.heads + 2 * self.kv_heads) * size, shape.hidden)
        # The mean of many random values is small, and fp16 would keep few bits of the products of such numbers.
        self.o_weight = weight(shape.hidden, self.heads * size, 8.0)
        self.gate_up_weight = weight(2 * wide, shape.hidden)
        self.down_weight = weight(shape.hidden, wide)
        self.x = matrix(tokens, shape.hidden, 3**0.5)

    def qkv(self) -> list[torch.Tensor]:
        """[1, heads, tokens, head size] each."""
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        parts = (self.x @ self.qkv_weight.t()).view(self.tokens, -1, self.shape.head_size).split(sizes, dim=1)
        return [part.transpose(0, 1).unsqueeze(0) for part in parts]

    def attend(self, qkv: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """Attention of these rows to all earlier rows and themselves: [rows, heads * head size]."""
        query, key, value = qkv[0][:, :, rows], qkv[1][:, :, : rows.stop], qkv[2][:, :, : rows.stop]
        if query.is_cuda:
            # Called by its own name, because torch's public function lets FlashAttention take only as many queries as
            # keys.
            found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False)[0]
        else:
            count = rows.stop - rows.start
            mask = torch.ones(count, rows.stop, dtype=torch.bool).tril(rows.start)
            found = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        return found.squeeze(0).transpose(0, 1).reshape(query.shape[2], -1)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Without down_proj."""
        gate, up = (x @ self.gate_up_weight.t()).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def attention_unit(self, collective: str, blocks: Sequence[int]) -> torch.Tensor:
        """Attention, o_proj and the sum. ``collective`` is "" for the plain variant."""
        qkv = self.qkv()
        if not collective:
            return self.sum_of(self.attend(qkv, slice(0, self.tokens)), self.o_weight)
        out = torch.empty_like(self.x)
        compute_and_sum(
            lambda rows, block: torch.mm(self.attend(qkv, rows), self.o_weight.t(), out=block),
            out,
            blocks,
            self.context.collectives[collective],
        )
        return out

    def mlp_unit(self, x: torch.Tensor, collective: str, blocks: Sequence[int]) -> torch.Tensor:
        if not collective:
            return self.sum_of(self.mlp(x), self.down_weight)
        out = torch.empty_like(x)
        compute_and_sum(
            lambda rows, block: torch.mm(self.mlp(x[rows]), self.down_weight.t(), out=block),
            out,
            blocks,
            self.context.collectives[collective],
        )
        return out

    def linear(self, o: tuple[str, Sequence[int]], down: tuple[str, Sequence[int]]) -> torch.Tensor:
        """Only o_proj and down_proj in blocks."""
        attended = self.attend(self.qkv(), slice(0, self.tokens))
        return self.tiled(self.mlp(self.tiled(attended, self.o_weight, o)), self.down_weight, down)

    def tiled(self, x: torch.Tensor, weight: torch.Tensor, how: tuple[str, Sequence[int]]) -> torch.Tensor:
        collective, blocks = how
        if not collective:
            return self.sum_of(x, weight)
        out = x.new_empty(x.shape[0], weight.shape[0])
        compute_and_sum(
            lambda rows, block: torch.mm(x[rows], weight.t(), out=block),
            out,
            blocks,
            self.context.collectives[collective],
        )
        return out

    def full(self, attention: tuple[str, Sequence[int]], mlp: tuple[str, Sequence[int]]) -> torch.Tensor:
        return self.mlp_unit(self.attention_unit(*attention), *mlp)

    def sum_of(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return plain_layer(x, weight, None) if self.context.size > 1 else F.linear(x, weight)


def measure(context: RankContext, layer: Layer, link: str, model: str, options: argparse.Namespace) -> None:
    tokens, whole = layer.tokens, ("", (layer.tokens,))
    place = {"link": link, "ranks": context.size, "model": model, "tokens": tokens}
    ways: dict[str, Callable[[], torch.Tensor]] = {"plain": lambda: layer.full(whole, whole)}
    timer = LayerTimer(context.collectives, plain_layer, layer.o_weight, 128)
    if context.size == 1:
        report(context, layer, place, ways, timer.seconds([*ways.values()], options.rounds), {}, {"plain": []})
        return
    o, down = (
        calibrate.measure(context.collectives, plain_layer, weight, tokens, tokens).of(tokens)
        for weight in (layer.o_weight, layer.down_weight)
    )
    attention = fastest(timer, layer, lambda how: layer.attention_unit(*how))
    mlp = fastest(timer, layer, lambda how: layer.mlp_unit(layer.x, *how))
    ways |= {"linear": lambda: layer.linear(o, down), "full": lambda: layer.full(attention, mlp)}
    parts = [lambda: layer.attention_unit(*whole), lambda: layer.mlp_unit(layer.x, *whole)]
    alone = timer.seconds([*parts, lambda: layer.attention_unit(*attention), lambda: layer.mlp_unit(layer.x, *mlp)])
    place["units ms"] = [1e3 * seconds for seconds in alone]
    expected = ways["plain"]()
    wrong = {way: difference(expected, compute()) for way, compute in ways.items()}
    took = timer.seconds([*ways.values()], options.rounds)
    report(context, layer, place, ways, took, wrong, {"plain": [], "linear": [o, down], "full": [attention, mlp]})
    if max(wrong.values()) > WORST:
        sys.exit(f"wrong by {wrong}")


def fastest(
    timer: LayerTimer, layer: Layer, unit: Callable[[tuple[str, Sequence[int]]], object]
) -> tuple[str, Sequence[int]]:
    """The fastest of a few splits by each collective, and of no split."""
    whole: tuple[str, Sequence[int]] = ("", (layer.tokens,))
    tried = [
        whole,
        *(
            (collective, cut(layer.tokens, weights, 128))
            for collective in layer.context.collectives
            for weights in CUTS
        ),
    ]
    first = timer.seconds([lambda how=how: unit(how) for how in tried], 3)
    best = [how for _, how in sorted(zip(first, tried, strict=True), key=lambda pair: pair[0])[:4]]
    plain, *again = timer.seconds([lambda how=how: unit(how) for how in (whole, *best)])
    seconds, how = min(zip(again, best, strict=True), key=lambda pair: pair[0])
    return how if seconds < (1 - MIN_GAIN) * plain else whole


def report(
    context: RankContext,
    layer: Layer,
    place: dict[str, object],
    ways: dict[str, Callable[[], torch.Tensor]],
    took: Sequence[float],
    wrong: dict[str, float],
    cuts: dict[str, Sequence[tuple[str, Sequence[int]]]],
) -> None:
    for way, seconds in zip(ways, took, strict=True):
        row = place | {"way": way, "ms": 1e3 * seconds, "first token s": seconds * layer.shape.layers}
        row |= {"speedup": took[0] / seconds, "error": wrong.get(way, 0.0)}
        context.tell(row | {"cuts": [(collective, list(blocks)) for collective, blocks in cuts[way]]})


if __name__ == "__main__":
    sys.exit(main())
