"""NaN and infinity in queries, keys and values reach what sees them, in every attention kernel for V100 and Turing.

An overflow of fp16 must not look like an answer. GPUs have one NaN, 0x7fffffff, and kernels that compute with bits may
lose it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.attention.volta.launch import HEAD_SIZES, TURING, VOLTA
from tests.attention import not_finite
from tests.attention.not_finite import Broken
from tests.attention.oracle import Case
from tests.kernels.volta import attention
from tests.kernels.volta.attention import LSE_TOLERANCE, TOLERANCE, emulated, simulated
from tests.kernels.volta.machine import more

FP16, E4M3, E5M2 = torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
KINDS: dict[str, dict[str, Any]] = {
    "prefill": {"q_lens": (40, 3), "kv_lens": (100, 20), "num_heads": 4},
    "prefill in parts": {"q_lens": (40,), "kv_lens": (200,), "num_heads": 2},
    "decode": {"q_lens": (2, 1), "kv_lens": (300, 129), "num_heads": 8},
    "decode_wide": {"q_lens": (5, 1), "kv_lens": (150, 129), "num_heads": 12},
}
FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"window": (30, -1)},
    {"softcap": 2.0},
    {"alibi": "shared"},
    {"sinks": 0.0},
    {"window": (40, -1), "softcap": 3.0, "alibi": "shared", "sinks": 1.0},
    {"kv_dtype": E4M3, "key_scale": 0.01, "value_scale": 0.02},
    {"kv_dtype": E5M2},
    {"page_size": 0},
]
SOON = [(kind, 256, VOLTA) for kind in KINDS]
SOON += [("prefill", 64, VOLTA), ("prefill", 64, TURING), ("decode", 64, TURING)]


def found(kind: str, problem: AttentionProblem, on: Any, architecture: int) -> tuple[torch.Tensor, torch.Tensor]:
    if kind.startswith("decode"):
        return attention.decode(problem, on, architecture)
    return attention.prefill(problem, on, 2 if kind == "prefill in parts" else 1, architecture)


def check(kind: str, problem: AttentionProblem, one: Broken, on: Any = emulated, architecture: int = VOLTA) -> None:
    problem = one.put(problem)
    out, lse = found(kind, problem, on, architecture)
    beside = one.beside(problem)
    not_finite.check(problem, out, lse, beside, (0, TOLERANCE), (0, LSE_TOLERANCE))


def kinds() -> list[Any]:
    every = [(kind, size, target) for kind in KINDS for size in HEAD_SIZES for target in (VOLTA, TURING)]
    return [one if one in SOON else more(*one) for one in every]


@pytest.mark.parametrize(("kind", "head_size", "architecture"), kinds())
@settings(max_examples=6)
@given(st.data())
def test_they_reach_what_sees_them(kind: str, head_size: int, architecture: int, data: st.DataObject) -> None:
    features = data.draw(st.sampled_from(FEATURES))
    problem = Case(head_size=head_size, dtype=FP16, **KINDS[kind] | features).build()
    check(kind, problem, data.draw(not_finite.broken(problem)), architecture=architecture)


SCORES = [("key", math.nan), ("key", math.inf), ("query", math.nan)]


@pytest.mark.parametrize(("part", "number"), SCORES)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_nan_and_infinity(kind: str, part: str, number: float) -> None:
    """At head size 256, where prefill packs its weights by operations on their bits."""
    problem = Case(head_size=256, dtype=FP16, **KINDS[kind]).build()
    check(kind, problem, Broken(part, number, 0, 0, 0, 7))


@pytest.mark.parametrize("cache", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_caches_of_8_bits(kind: str, cache: torch.dtype) -> None:
    problem = Case(head_size=256, dtype=FP16, kv_dtype=cache, **KINDS[kind]).build()
    check(kind, problem, Broken("key", math.nan, 0, 10, 0, 7))
    check(kind, problem, Broken("value", math.nan, 0, 10, 0, 7))


COMPILED = [(kind, size) for kind in KINDS for size in (64, 128, 256)]


@pytest.mark.parametrize(("kind", "head_size"), [one if one == ("prefill", 256) else more(*one) for one in COMPILED])
def test_machine_code(kind: str, head_size: int) -> None:
    problem = Case(head_size=head_size, dtype=FP16, **KINDS[kind]).build()
    for part, number in SCORES:
        check(kind, problem, Broken(part, number, 0, 0, 0, 7), simulated)
    check(kind, problem, Broken("value", math.inf, 0, 10, 0, 7), simulated)
