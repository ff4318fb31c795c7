"""benchmarks/volta_gated_delta.py: what is counted."""

from __future__ import annotations

import torch
import volta_gated_delta
from volta_gated_delta import Operator, Recorder, operators, seconds


def test_bytes_and_flops_of_operators() -> None:
    left, right = torch.empty(3, 4, 5, device="meta"), torch.empty(3, 5, 6, device="meta")
    with Recorder() as recorder:  # type: ignore[no-untyped-call]
        out = left.transpose(1, 2).transpose(1, 2) @ right
        out.add_(1)
        torch.baddbmm(out, left, right)
    assert [(one.bytes, one.flops) for one in recorder.operators] == [
        (4 * (60 + 90 + 72), 2 * 3 * 4 * 5 * 6),
        (4 * (72 + 72), 0),
        (4 * (72 + 60 + 90 + 72), 2 * 3 * 4 * 5 * 6),
    ]


def test_the_longest_of_bytes_flops_and_launches_counts() -> None:
    reads, computes = Operator("reads", 817_000_000, 0), Operator("computes", 0, 9_000_000_000)
    assert seconds([reads, computes], tflops=9, launch_us=1) == 2e-3
    assert seconds([reads, computes], tflops=9, launch_us=1500) == 3e-3


def test_flops_are_those_of_the_algorithm() -> None:
    """Of a chunk and head: a part of T's inverse, w and u, v' and what the state adds, the update, and the output."""
    tokens = 1024
    found = sum(one.flops for one in operators(tokens, 1))
    heads, shared, chunk, size = volta_gated_delta.VALUE_HEADS, volta_gated_delta.KEY_HEADS, 64, 128
    solved = 2 * 2 * size * (4 * 16 * 16 + 16 * (16 + 32 + 48))
    of_value_heads = solved + 3 * 2 * chunk * size * size + 2 * chunk * chunk * size
    of_key_heads = 2 * 2 * chunk * chunk * size
    assert found == tokens // chunk * (heads * of_value_heads + shared * of_key_heads)
