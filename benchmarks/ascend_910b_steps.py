"""Kinds of step for ascend_910b.py, and whether the NPU's results for them are right.

Used by: ascend_910b.py.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from fastattention_vllm.attention import ascend
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.bench.hardware_report import reference
from fastattention_vllm.bench.report import Row, compared

PAGE = 128
ALLOWED = {torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Relative to the size of a result and to the root mean square of all. An operator that also rounds its weights to the
query's dtype stays below.
"""


@dataclass(frozen=True)
class Step:
    name: str
    new: tuple[int, ...]
    """Query tokens of each sequence."""
    kept: tuple[int, ...]
    """Tokens of each sequence, including these."""
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    dtype: torch.dtype = torch.float16
    window: int = -1
    int8: bool = False

    @property
    def phase(self) -> str:
        return "decode" if max(self.new) == 1 else "prefill"

    def build(self, device: torch.device) -> AttentionProblem:
        random = torch.Generator().manual_seed(0)
        pages = [-(-tokens // PAGE) for tokens in self.kept]
        starts = [0]
        for count in self.new:
            starts.append(starts[-1] + count)
        shape = (sum(pages), PAGE, self.kv_heads, self.head_size)
        if self.int8:
            key, value = (torch.randint(-127, 128, shape, generator=random, dtype=torch.int8) for _ in range(2))
        else:
            key, value = (torch.randn(shape, generator=random, dtype=torch.float32).to(self.dtype) for _ in range(2))
        table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        order = torch.randperm(sum(pages), generator=random).to(torch.int32)
        for sequence, own in enumerate(order.split(pages)):
            table[sequence, : len(own)] = own
        query = torch.randn(starts[-1], self.heads, self.head_size, generator=random).to(self.dtype)
        return AttentionProblem(
            query=query.to(device),
            key=key.to(device),
            value=value.to(device),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(self.kept, dtype=torch.int32),
            scale=self.head_size**-0.5,
            causal=True,
            block_table=table.to(device),
            window=(self.window, -1),
            key_scale=1 / 32 if self.int8 else 1.0,
            value_scale=1 / 32 if self.int8 else 1.0,
        )


def right_steps() -> list[Step]:
    shapes = {
        "prefill": ((130, 7), (130, 7)),
        "decode": ((1, 1, 1), (1, 129, 700)),
        "chunked prefill": ((200, 64), (700, 64)),
        "mixed": ((1, 1, 300), (300, 5, 500)),
    }
    return [
        Step(f"{name}, head size {size}, {kind}", new, kept, 8, 2, size, dtype, window, int8)
        for name, (new, kept) in shapes.items()
        for size in (64, 128, 192)
        for kind, dtype, window, int8 in (
            ("fp16", torch.float16, -1, False),
            ("bf16", torch.bfloat16, -1, False),
            ("window", torch.bfloat16, 50, False),
            ("int8 cache", torch.bfloat16, -1, True),
        )
    ]


def check(step: Step, device: torch.device, kernels: Any = ascend, name: str = "") -> Row | None:
    """Compare ``kernels`` with float64. None if they do not support this step; ``name`` is added to the case."""
    found: dict[str, Any] = {"right": False}
    error, allowed = None, ALLOWED[step.dtype]
    with reported(found):
        problem = step.build(device)
        if kernels is not ascend and kernels.can_run(problem) is not None:
            return None
        expected = reference(problem)
        out, _ = kernels.run(problem)
        size = expected.abs() + expected.square().mean().sqrt()
        error = float(((out.cpu().double() - expected).abs() / size).max())
        found["right"] = error <= allowed  # NaN counts as wrong
    return verdict(step.name + name, f"{step.phase} error", error, allowed, found)


def verdict(case: str, metric: str, error: float | None, allowed: float, found: dict[str, Any]) -> Row:
    if not found["right"]:
        print(f"WRONG {case}: {found.get('failed', error)}", flush=True)
    return compared(case, metric, "of the answer's size", error, better="lower", limit=allowed, **found)


@contextlib.contextmanager
def reported(row: dict[str, Any]) -> Any:
    """A failing case must not stop the others."""
    try:
        yield
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:500]
