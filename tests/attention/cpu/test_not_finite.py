"""NaN and infinity in queries, keys and values reach what sees them, with every instruction set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.problem import AttentionProblem
from tests.attention import not_finite
from tests.attention.cpu.test_attention import each_isa
from tests.attention.not_finite import Broken
from tests.attention.oracle import BF16_ISAS, LSE_TOLERANCE, OUTPUT_TOLERANCE, WEIGHT_ROUNDING, Case

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LENGTHS = [((1, 1), (300, 77)), ((3,), (2000,)), ((65, 9), (300, 140)), ((40, 1), (40, 30)), ((2,), (9,))]
"""The second is split over threads, whose parts are merged."""
FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"window": (30, -1)},
    {"softcap": 2.0},
    {"alibi": "per sequence"},
    {"sinks": 0.0},
    {"window": (40, -1), "softcap": 3.0, "alibi": "shared", "sinks": 1.0},
    {"page_size": 0},
]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """So that a long sequence is split."""
    before = cpu.num_threads()
    cpu.set_num_threads(2)
    yield
    cpu.set_num_threads(before)


def check(problem: AttentionProblem, one: Broken) -> None:
    dtype = problem.query.dtype
    # Values of about 1: what oracle.assert_matches allows, of the largest of them.
    relative, absolute = OUTPUT_TOLERANCE[dtype]
    rounding = 4 * WEIGHT_ROUNDING.get(dtype, 0.0)
    tolerance = (relative, 4 * absolute + rounding)
    for isa in each_isa():
        number, beside = one, one.beside(problem)
        if isa in BF16_ISAS and dtype != F32:  # kernels/cpu/README.md, Limits: infinity may be NaN, and in two columns
            number = replace(one, number=math.nan)
            beside |= replace(one, column=one.column ^ 1).beside(problem)
        broken = number.put(problem)
        out, lse = torch.zeros_like(problem.query), torch.zeros(problem.query.shape[:2])
        cpu.run(broken, out, lse)
        not_finite.check(broken, out, lse, beside, tolerance, (LSE_TOLERANCE[0], 1e-4))


@settings(max_examples=40)
@given(st.data())
def test_they_reach_what_sees_them(data: st.DataObject) -> None:
    q_lens, kv_lens = data.draw(st.sampled_from(LENGTHS))
    dtype = data.draw(st.sampled_from([F32, F16, BF16]))
    heads = data.draw(st.sampled_from([(2, 2), (4, 2), (8, 1)]))
    problem = Case(
        q_lens,
        kv_lens,
        *heads,
        data.draw(st.sampled_from([8, 64, 80, 128, 256])),
        dtype=dtype,
        kv_dtype=data.draw(st.sampled_from([None, None, E4M3, E5M2])),
        **data.draw(st.sampled_from(FEATURES)),
    ).build()
    check(problem, data.draw(not_finite.broken(problem)))
