"""Prompts in Gated DeltaNet layers on a V100, counted: the time beside that of the model's matrix products.

    python benchmarks/volta_gated_delta.py --json FILE

Run by: contributors who change attention/volta/gated_delta.py.
Needs: `make setup-dev`. No GPU.

The operators of one layer are recorded on tensors without storage. Each takes the longest of three times: its bytes at
817 GB/s, its FLOPs at an assumed rate of cuBLAS in fp32, and the CPU's time to launch it, which is assumed, too. The
layers have the shape of Qwen3.5-27B, whose matrix products take 54 GFLOP a token (facts of the model's config) at an
assumed 90 TFLOPS.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastattention_vllm.attention.volta.gated_delta import Schedule, gated_delta_rule, tokens_at_once
from fastattention_vllm.bench.report import Row, compared, report

LAYERS, KEY_HEADS, VALUE_HEADS, SIZE = 48, 16, 48, 128
GEMM_FLOPS = 54e9
"""Of a token, in all layers."""
GEMM_TFLOPS = 90.0
FEED = 817.0
"""GB/s."""
RATES = (9.0, 6.0, 12.0)
"""TFLOPS of cuBLAS for batches of products of 64 x 128 x 128 in fp32, whose peak is 15.7. The first is assumed."""
LAUNCHES = (6.0, 4.0, 10.0)
"""Microseconds of the CPU for an operator. The first is assumed."""
MUST = {1: 0.10, 2: 0.15, 4: 0.20}
"""Of the matrix products' time, by GPUs."""
aten = torch.ops.aten
PRODUCTS = {aten.bmm.default, aten.bmm.out, aten.baddbmm.default, aten.baddbmm_.default, aten.mm.default}


@dataclass(frozen=True)
class Operator:
    name: str
    bytes: int
    flops: int


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or "empty" in str(func) or "_unsafe_view" in str(func):
            return result
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        # An operator in place has its output among the inputs, and reads and writes it.
        moved = sum(one.numel() * one.element_size() for one in [*given, *made])
        flops = 0
        if func in PRODUCTS:
            left, right = given[-2:] if func is not aten.bmm.out else given[:2]
            flops = 2 * left.numel() * right.shape[-1]
        self.operators.append(Operator(str(func), moved, flops))
        return result


def operators(tokens: int, gpus: int) -> list[Operator]:
    """Of one layer, for a request of ``tokens`` tokens."""
    key_heads, value_heads, meta = KEY_HEADS // gpus, VALUE_HEADS // gpus, torch.device("meta")
    schedule = Schedule([0, tokens], tokens_at_once(value_heads, SIZE, SIZE), meta)

    def half(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.float16, device=meta)

    g = torch.empty(tokens, value_heads, device=meta)
    states = torch.empty(1, value_heads, SIZE, SIZE, device=meta)
    q, k, v = half(tokens, key_heads, SIZE), half(tokens, key_heads, SIZE), half(tokens, value_heads, SIZE)
    with Recorder() as recorder:  # type: ignore[no-untyped-call]
        gated_delta_rule(q, k, v, g, half(tokens, value_heads), states, schedule, normalise=True)
    return recorder.operators


def seconds(found: list[Operator], tflops: float, launch_us: float) -> float:
    """Of one layer. The CPU launches operators while the GPU computes earlier ones: the longer of both sums counts."""
    gpu = sum(max(one.bytes / (1e9 * FEED), one.flops / (1e12 * tflops)) for one in found)
    return max(gpu, 1e-6 * launch_us * len(found))


def products_seconds(tokens: int, gpus: int) -> float:
    """Of the model's matrix products, on each GPU."""
    return GEMM_FLOPS * tokens / gpus / (1e12 * GEMM_TFLOPS)


def beside_products(tokens: int, gpus: int, how: str, ours: float, **more: Any) -> Row:
    """A row for ``ours`` seconds of a prompt in all layers. ``how``: the way in which they are known."""
    products = products_seconds(tokens, gpus)
    return compared(
        f"prefill Gated DeltaNet of Qwen3.5-27B, {tokens} tokens, TP {gpus}",
        f"prefill time, {how}",
        "ms",
        1000 * ours,
        better="lower",
        peer_name="matrix products of the model",
        peer=1000 * products,
        limit=1000 * MUST[gpus] * products,
        share=round(ours / products, 4),
        **more,
    )


def row(tokens: int, gpus: int) -> Row:
    found = operators(tokens, gpus)
    gemm = products_seconds(tokens, gpus)
    shares = {
        f"{tflops:g} TFLOPS, {launch:g} us": round(LAYERS * seconds(found, tflops, launch) / gemm, 4)
        for tflops in RATES
        for launch in LAUNCHES
    }
    return beside_products(
        tokens,
        gpus,
        "counted",
        LAYERS * seconds(found, RATES[0], LAUNCHES[0]),
        operators=LAYERS * len(found),
        gigabytes=round(LAYERS * sum(one.bytes for one in found) / 1e9, 1),
        gflop=round(LAYERS * sum(one.flops for one in found) / 1e9, 1),
        shares=shares,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4], choices=list(MUST))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row(tokens, gpus) for gpus in options.gpus for tokens in options.tokens]
    table = Table(title="V100, counted: Gated DeltaNet layers of Qwen3.5-27B beside the matrix products")
    for name in ("case", "ms", "share", "lowest", "highest", "operators", "GB", "GFLOP"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for one in rows:
        more = one.model_extra or {}
        shares = list(more["shares"].values())
        numbers = [f"{one.ours:.0f}", f"{more['share']:.1%}", f"{min(shares):.1%}", f"{max(shares):.1%}"]
        table.add_row(one.case, *numbers, str(more["operators"]), str(more["gigabytes"]), str(more["gflop"]))
    Console(width=150).print(table)
    if options.json:
        report(rows, "NVIDIA V100, counted; not yet run on hardware").write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
