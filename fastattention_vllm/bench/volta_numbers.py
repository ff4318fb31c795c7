"""Whether the V100, T4 and RTX 20 kernels give right answers on this GPU, over everything that they support.

Used by: command.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.attention.volta import kernels as volta
from fastattention_vllm.attention.volta.launch import HEAD_SIZES
from fastattention_vllm.bench.hardware_report import Check, reference
from fastattention_vllm.bench.volta import TOLERANCE

PAGE, HEADS, KV_HEADS = 16, 8, 2
SHAPES = {
    "prefill": ((130, 7), (130, 7)),
    "decode": ((1, 1, 1), (1, 129, 700)),
    "chunked prefill": ((200, 64), (700, 64)),
    "mixed": ((1, 1, 300), (300, 5, 500)),
}
"""New tokens and all tokens of each sequence."""
CACHES = {"fp16": torch.float16, "fp8 e5m2": torch.float8_e5m2, "fp8 e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Step:
    shape: str
    head_size: int
    kind: str
    cache: torch.dtype = torch.float16
    window: int = -1
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False

    def __str__(self) -> str:
        return f"{self.shape}, head size {self.head_size}, {self.kind}"

    def build(self, device: torch.device) -> AttentionProblem:
        """Numbers of unit variance in shuffled pages."""
        new, kept = SHAPES[self.shape]
        random = torch.Generator().manual_seed(0)
        pages = [-(-tokens // PAGE) for tokens in kept]
        shape = (sum(pages), PAGE, KV_HEADS, self.head_size)
        key, value = (torch.randn(shape, generator=random).half().to(self.cache).to(device) for _ in range(2))
        table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        order = torch.randperm(sum(pages), generator=random).to(torch.int32)
        for sequence, own in enumerate(order.split(pages)):
            table[sequence, : len(own)] = own
        starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
        query = torch.randn(sum(new), HEADS, self.head_size, generator=random).half()
        slopes = torch.tensor([2.0 ** -(head + 1) for head in range(HEADS)])
        return AttentionProblem(
            query=query.to(device),
            key=key,
            value=value,
            query_start_loc=starts,
            seq_lens=torch.tensor(kept, dtype=torch.int32),
            scale=self.head_size**-0.5,
            causal=True,
            block_table=table.to(device),
            window=(self.window, -1),
            softcap=self.softcap,
            alibi_slopes=slopes.to(device) if self.alibi else None,
            sinks=torch.randn(HEADS, generator=random).to(device) if self.sinks else None,
        )


def steps(head_sizes: Sequence[int] = HEAD_SIZES) -> Iterator[Step]:
    for size in head_sizes:
        for shape in SHAPES:
            for name, cache in CACHES.items():
                yield Step(shape, size, f"{name} cache", cache)
            yield Step(shape, size, "window", window=50)
            yield Step(shape, size, "soft cap", softcap=30.0)
            yield Step(shape, size, "ALiBi", alibi=True)
            yield Step(shape, size, "sinks", sinks=True)


def check(step: Step, device: torch.device) -> Check:
    """A step that fails must not cost the others."""
    try:
        problem = step.build(device)
        out, _ = volta.run(problem)
        error = float((out.cpu().double() - reference(problem)).abs().max())
    except (RuntimeError, ValueError, OSError) as failed:
        note = f"{type(failed).__name__}: {' '.join(str(failed).split())[:200]}"
        return Check(case=str(step), error=None, allowed=TOLERANCE, right=False, note=note)
    is_number = error == error
    note = "" if is_number else "the answer contains NaN."
    right = error <= TOLERANCE
    return Check(case=str(step), error=error if is_number else None, allowed=TOLERANCE, right=right, note=note)
