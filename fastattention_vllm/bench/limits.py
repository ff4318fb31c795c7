"""The roofline of a case: the longer of reading its pages and its arithmetic, both measured on the same threads.

Used by: runner.py.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch

from fastattention_vllm.attention.cpu import roofline
from fastattention_vllm.bench.cases import DTYPES, Case
from fastattention_vllm.bench.contender import block_table
from fastattention_vllm.bench.measure import Subject, run_rounds
from fastattention_vllm.bench.sampling import Rotation

READ_METHODS = [roofline.ReadMethod(ahead, streams) for streams in (1, 2, 4) for ahead in (0, 2048, 4096)]
_PEAK_SECONDS = 0.03
_TRY_SECONDS = 0.03


@dataclass(frozen=True, slots=True)
class Roofline:
    """``read`` and ``arithmetic``: seconds that a case takes at least for its memory and for its FLOPs."""

    read: float
    arithmetic: float

    @property
    def seconds(self) -> float:
        return max(self.read, self.arithmetic)

    @property
    def longer(self) -> str:
        return "read" if self.read >= self.arithmetic else "flops"


FP16_PRODUCTS = 4
"""Of bf16 for one of fp16, each number being the sum of two of bf16."""


def usable_kinds(dtype: str) -> dict[str, int]:
    """Arithmetic units of this machine that can take the products of ``dtype`` (a case's query dtype), and how many of
    theirs stand for one of it."""
    products = {"bf16": 1, "fp16": FP16_PRODUCTS}
    found = {}
    for kind in roofline.peak_kinds():
        if kind == "fp32_fma":
            found[kind] = 1
        # A bf16 dot product on vectors in four is slower than fp32 multiply-adds wherever there is one.
        elif dtype == "bf16" or (dtype == "fp16" and kind == "bf16_amx"):
            found[kind] = products[dtype]
    return found


class Peak:
    """One arithmetic unit at full speed: a call runs for about 30 ms."""

    def __init__(self, kind: str, products: int = 1) -> None:
        self._unit, self._products = kind, products
        self.kind = kind if products == 1 else f"{kind} / {products}"
        self.flops = 0.0
        """Of one call."""
        self._iterations = 1000
        while (seconds := self._seconds()) < _PEAK_SECONDS / 2:
            self._iterations = int(self._iterations * min(100.0, 1.2 * _PEAK_SECONDS / max(seconds, 1e-6)))

    def __call__(self) -> None:
        self.flops = roofline.peak(self._unit, self._iterations) / self._products

    def rate(self) -> float:
        """FLOP/s, the best of five."""
        fastest = min(self._seconds() for _ in range(5))
        return self.flops / fastest

    def _seconds(self) -> float:
        start = time.perf_counter()
        self()
        return time.perf_counter() - start


def fastest_peak(dtype: str) -> Peak:
    """The unit that is fastest in fact: a bf16 dot product can be slower than fp32 multiply-adds."""
    return max((Peak(kind, products) for kind, products in usable_kinds(dtype).items()), key=Peak.rate)


def page_readers(case: Case, layers: list[torch.Tensor]) -> list[roofline.PageReader]:
    """One reader per layer of the very bytes that attention reads.

    In the order of addresses, neighbours joined: no order of the block table can be faster. ``layers`` are in the
    paged layout ``[blocks, KV heads, K and V, page, head_size]``; what lies behind the last token of a sequence is left
    out.
    """
    row = 2 * case.head_size * DTYPES[case.kv_dtype].itemsize
    table = block_table(case)
    used = torch.full((table.numel(),), case.page)
    used[table[:, -1].long()] = case.kv_len - (case.pages_per_seq - 1) * case.page
    runs: list[list[int]] = []
    for block, tokens in enumerate(used.tolist()):
        begin = block * case.num_kv_heads * case.page * row
        parts = 1 if tokens == case.page else 2 * case.num_kv_heads
        size = tokens * row * case.num_kv_heads // parts
        for part in range(parts):
            at = begin + part * case.page * row // 2
            if runs and sum(runs[-1]) == at:
                runs[-1][1] += size
            else:
                runs.append([at, size])
    return [
        roofline.PageReader([layer.data_ptr() + at for at, _ in runs], [size for _, size in runs]) for layer in layers
    ]


def fastest_read(readers: list[roofline.PageReader], rotation: Rotation) -> roofline.ReadMethod:
    """The method that read the pages in the shortest time just now. It is then timed anew, next to everyone else."""
    tried = {
        method: Subject(str(method), [functools.partial(reader.read, method) for reader in readers], _TRY_SECONDS)
        for method in READ_METHODS
    }
    run_rounds(list(tried.values()), rotation, rounds=3)
    return min(tried, key=lambda method: tried[method].samples.median)
