"""NaN and infinity on a real GPU, in the kernels for V100 and Turing: see tests/kernels/volta/test_not_finite.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.attention.volta import kernels as volta
from fastattention_vllm.attention.volta import launch as volta_kernels
from fastattention_vllm.attention.volta.launch import HEAD_SIZES
from kernels.volta import variants
from tests.attention import not_finite
from tests.attention.not_finite import Broken
from tests.attention.oracle import Case
from tests.gpu.test_volta import gpu, on_gpu  # noqa: F401  an autouse fixture
from tests.kernels.volta.attention import LSE_TOLERANCE, TOLERANCE
from tests.kernels.volta.test_cache import DTYPES
from tests.kernels.volta.test_not_finite import FEATURES

FP16 = torch.float16
KINDS: dict[str, dict[str, Any]] = {
    "prefill": {"q_lens": (170, 40, 3), "kv_lens": (170, 120, 33), "num_heads": 6, "num_kv_heads": 2},
    "prefill in parts": {"q_lens": (100, 40), "kv_lens": (3000, 40), "num_heads": 6, "num_kv_heads": 2},
    "decode": {"q_lens": (2, 1, 1), "kv_lens": (3000, 1, 129), "num_heads": 8, "num_kv_heads": 2},
    "decode_wide": {"q_lens": (5, 1, 3), "kv_lens": (3000, 129, 4), "num_heads": 12, "num_kv_heads": 2},
}
PLACES = [
    Broken(part, number, seq, token, 1, 7)
    for part, seq, token in (("query", 0, 0), ("key", 0, 0), ("key", 0, 20), ("key", 1, 0), ("value", 0, 20))
    for number in not_finite.NUMBERS
]


def check(problem: AttentionProblem, one: Broken) -> None:
    problem = one.put(problem)
    out, lse = volta.run(on_gpu(problem), return_lse=True)
    assert lse is not None
    not_finite.check(problem, out.cpu(), lse.cpu(), one.beside(problem), (0, TOLERANCE), (0, LSE_TOLERANCE))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_at_every_head_size(kind: str, head_size: int) -> None:
    case = Case(head_size=head_size, dtype=FP16, **KINDS[kind])
    rows = max(case.q_lens) * case.num_heads // case.num_kv_heads
    if kind.startswith("prefill"):
        variant = variants.prefill(head_size)
        grid = volta_kernels.prefill_grid(variant, rows, case.num_kv_heads, len(case.q_lens))
        parts = volta_kernels.prefill_parts(variant, grid, max(case.kv_lens))
        assert (parts > 1) == (kind == "prefill in parts")
    else:
        assert volta_kernels.kind_of(rows) == kind
    problem = case.build()
    for one in PLACES:
        check(problem, one)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("cache", [one for one in DTYPES if one != torch.int8], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_caches_of_8_bits(kind: str, cache: torch.dtype, head_size: int) -> None:
    problem = Case(head_size=head_size, dtype=FP16, kv_dtype=cache, **KINDS[kind]).build()
    for part in ("query", "key", "value"):
        check(problem, Broken(part, math.nan, 0, 1, 1, 7))


@settings(max_examples=200)
@given(st.data())
def test_drawn_problems(data: st.DataObject) -> None:
    kind, features = data.draw(st.sampled_from(sorted(KINDS))), data.draw(st.sampled_from(FEATURES))
    problem = Case(head_size=data.draw(st.sampled_from(HEAD_SIZES)), dtype=FP16, **KINDS[kind] | features).build()
    check(problem, data.draw(not_finite.broken(problem)))
