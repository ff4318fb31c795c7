"""Calls of the NPU's fused attention against float64, through an operator that asserts the documented limits.

Where torch_npu is installed (`make test-ascend`), calls go through its genuine schema; elsewhere directly to the
operator.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention import ascend
from fastattention_vllm.attention.problem import AttentionProblem
from tests.ascend import operator as ascend_operator
from tests.attention.oracle import Case, attention

GENUINE = importlib.util.find_spec("torch_npu") is not None
# The output is rounded once. A dequantised bf16 or fp16 key adds one more rounding of a factor.
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
LIBRARIES: list[Any] = []


@pytest.fixture(autouse=True, scope="module")
def bound() -> Iterator[None]:
    """Replace the NPU's operator with ours."""
    with pytest.MonkeyPatch.context() as patch:
        if GENUINE:
            import torch_npu  # noqa: F401

            if not torch._C._dispatch_has_kernel_for_dispatch_key("npu::npu_fused_infer_attention_score", "CPU"):
                library = torch.library.Library("npu", "IMPL")
                function = ascend_operator.npu_fused_infer_attention_score
                library.impl("npu_fused_infer_attention_score", function, "CPU")
                LIBRARIES.append(library)
        else:
            patch.setattr(ascend, "operator", lambda: ascend_operator.npu_fused_infer_attention_score)
        yield


def build(case: Case) -> AttentionProblem:
    """Build the problem with separate, contiguous K and V, as in vllm-ascend.

    Unused memory is zero, as allocated there.
    """
    problem = case.build()
    key, value = (cache.float().nan_to_num(0.0).to(cache.dtype).contiguous() for cache in (problem.key, problem.value))
    return replace(problem, key=key, value=value, query=problem.query.nan_to_num(0.0))


def quantised(problem: AttentionProblem) -> AttentionProblem:
    """The same problem with an int8 cache. The problem's keys and values are replaced by their rounded values."""
    scales = [float(cache.float().abs().max()) / 127 or 1.0 for cache in (problem.key, problem.value)]
    # A power of two is exact in both fp16 and bf16.
    key_scale, value_scale = (2.0 ** torch.tensor(scale).log2().ceil().item() for scale in scales)
    key, value = (
        (cache.float() / scale).round().to(torch.int8)
        for cache, scale in ((problem.key, key_scale), (problem.value, value_scale))
    )
    return replace(problem, key=key, value=value, key_scale=key_scale, value_scale=value_scale)


def assert_right(problem: AttentionProblem) -> None:
    ascend_operator.calls.clear()
    out, lse = ascend.run(problem, return_lse=True)
    expected, expected_lse = attention(problem)
    real = int(problem.query_start_loc[-1])
    size = max(1.0, float(expected[:real].abs().max())) if real else 1.0
    step = ROUNDING[problem.query.dtype]
    torch.testing.assert_close(out[:real].double(), expected[:real], rtol=step, atol=step * 1e-3 * size)
    assert lse is not None
    torch.testing.assert_close(lse[:real].double(), expected_lse[:real], rtol=1e-6, atol=1e-5)


SHAPES = {
    "prefill": ((33, 7, 130), (33, 7, 130)),
    "decode": ((1, 1, 1, 1), (1, 40, 129, 300)),
    "chunked prefill": ((20, 1, 64), (148, 2, 64)),
    "mixed": ((1, 1, 40, 1, 9), (77, 128, 40, 5, 400)),
}


@pytest.mark.parametrize("head_size", [64, 128, 192])
@pytest.mark.parametrize("window", [(-1, -1), (50, -1)], ids=["full", "window"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_float64(shape: str, window: tuple[int, int], head_size: int) -> None:
    new, kept = SHAPES[shape]
    assert_right(
        build(Case(new, kept, 8, 2, head_size, page_size=128, dtype=torch.float16, layout="NHD", window=window))
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (64, 1), (6, 2)])
def test_query_heads_share_kv_heads(heads: tuple[int, int], dtype: torch.dtype) -> None:
    assert_right(build(Case((3, 1), (70, 9), *heads, head_size=128, page_size=16, dtype=dtype, layout="NHD")))


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [(-1, -1), (20, -1)], ids=["full", "window"])
def test_contiguous_keys(head_size: int, causal: bool, window: tuple[int, int]) -> None:
    case = Case(
        (30, 1, 12), (30, 44, 60), 4, 2, head_size, page_size=0, dtype=torch.bfloat16, causal=causal, window=window
    )
    assert_right(build(case))


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_cache(shape: str, head_size: int) -> None:
    new, kept = SHAPES[shape]
    case = Case(new, kept, 8, 2, head_size, page_size=128, dtype=torch.bfloat16, layout="NHD")
    assert_right(quantised(build(case)))


def test_window_over_an_int8_cache() -> None:
    case = Case((1, 1, 9), (300, 17, 200), 4, 2, 128, page_size=64, dtype=torch.float16, layout="NHD", window=(40, -1))
    assert_right(quantised(build(case)))


def test_padding_and_empty_sequences_are_left_alone() -> None:
    problem = build(Case((2, 0, 1, 0), (5, 3, 9, 1), 4, 2, 128, 128, torch.float16, layout="NHD", padding=3))
    assert_right(problem)
    empty = build(Case((0,), (3,), 4, 2, 128, 128, torch.float16, layout="NHD"))
    assert ascend.plan(empty) == ()
    assert_right(empty)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 200)), min_size=1, max_size=5),
    st.sampled_from([16, 80, 128]),
    st.sampled_from([-1, 0, 1, 63, 128]),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_batch(lengths: list[tuple[int, int]], head_size: int, window: int, int8: bool, seed: int) -> None:
    size = 32 * -(-head_size // 32) if int8 else head_size
    new, kept = [q for q, _ in lengths], [q + earlier for q, earlier in lengths]
    case = Case(
        new, kept, 4, 2, size, page_size=128, dtype=torch.bfloat16, layout="NHD", window=(window, -1), seed=seed
    )
    problem = build(case)
    assert_right(quantised(problem) if int8 else problem)


def test_ragged_sequences_take_one_call() -> None:
    new, kept = SHAPES["mixed"]
    problem = build(Case(new, kept, 8, 2, 128, page_size=128, dtype=torch.float16, layout="NHD"))
    assert_right(problem)
    assert ascend_operator.calls == [{"layout": "TND", "sparse_mode": 3, "paged": True}]


def test_sequences_of_each_length_take_one_call_without_padding() -> None:
    new, kept = SHAPES["mixed"]
    problem = build(Case(new, kept, 8, 2, 64, page_size=128, dtype=torch.float16, layout="NHD"))
    assert_right(problem)
    batch = {"layout": "BSND", "paged": True}
    assert ascend_operator.calls == [batch | {"sparse_mode": mode} for mode in (0, 3, 3)]


def test_one_mask_serves_every_length() -> None:
    mask = ascend.compressed_mask(torch.device("cpu"))
    assert mask.numel() * mask.element_size() == 4 << 20
    assert ascend.compressed_mask(torch.device("cpu")) is mask
    problem = build(Case((100,), (5000,), 1, 1, 128, page_size=128, dtype=torch.float16, layout="NHD"))
    assert_right(problem)
    given_mask = ascend.arguments(problem, ascend.plan(problem)[0])["atten_mask"]
    assert given_mask is mask


GOOD = Case((3, 1), (70, 9), 4, 2, 128, page_size=128, dtype=torch.float16, layout="NHD")


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (replace(GOOD, dtype=torch.float32), "float32.*--dtype bfloat16"),
        (replace(GOOD, kv_dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        (replace(GOOD, softcap=30.0), "soft cap"),
        (replace(GOOD, alibi="shared"), "ALiBi"),
        (replace(GOOD, sinks=0.0), "sinks"),
        (replace(GOOD, num_heads=65, num_kv_heads=1), "65 query heads and 1 KV heads"),
        (replace(GOOD, num_heads=260, num_kv_heads=260, head_size=16), "260 query heads"),
        (replace(GOOD, head_size=72), "the head size is 72, but it must be a multiple of 16"),
        (replace(GOOD, head_size=528), "head size is 528"),
        (replace(GOOD, page_size=24), "24 tokens.*--block-size 128"),
        (replace(GOOD, page_size=2048), "2048 tokens"),
        (replace(GOOD, page_size=16, head_size=64), "16 tokens.*head size 64.*--block-size 128"),
        (replace(GOOD, num_heads=256, num_kv_heads=256, head_size=256), "65535"),
        (replace(GOOD, kv_lens=(2, 9)), "3 query tokens but only 2 keys"),
        (replace(GOOD, q_lens=[1] * 4097, kv_lens=[1] * 4097, page_size=16, num_heads=1, num_kv_heads=1), "4097 seq"),
    ],
)
def test_unsupported_problems_are_refused_in_one_sentence(case: Case, sentence: str) -> None:
    problem = build(case)
    with pytest.raises(ValueError, match=sentence) as refused:
        ascend.run(problem)
    assert str(refused.value) == ascend.can_run(problem)
    assert str(refused.value).count(".") - str(refused.value).count("torch.") == 1


def test_a_cache_of_strided_pages_is_refused() -> None:
    problem = GOOD.build()  # [blocks, 2, page, heads, size]: K and V are interleaved
    assert "contiguous" in str(ascend.can_run(problem))


def test_int8_has_stricter_limits() -> None:
    assert "multiple of 32" in str(ascend.can_run(quantised(build(replace(GOOD, head_size=80)))))
    assert "multiple of 32" in str(ascend.can_run(quantised(build(replace(GOOD, page_size=16)))))
