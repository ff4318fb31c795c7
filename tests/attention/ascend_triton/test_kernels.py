"""The NPU's Triton programs against float64, in Triton's interpreter: numbers, masks and addresses, not speed.

The interpreter computes products of fp16 and bf16 in fp32, as the cube does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.ascend_triton import device_work, kernels
from fastattention_vllm.attention.ascend_triton.masks import PAGE
from fastattention_vllm.attention.problem import AttentionProblem
from tests.attention import not_finite
from tests.attention.ascend_triton.interpreter import teach_bf16
from tests.attention.not_finite import Broken
from tests.attention.oracle import Case, attention

ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Half a unit in the last place. The output is rounded once, and so is each weight before it multiplies a value."""


@pytest.fixture(autouse=True, scope="module")
def bf16() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        teach_bf16(patch)
        yield


def assert_right(problem: AttentionProblem) -> None:
    """Outputs and log-sum-exps of real tokens equal float64's; rows of padding stay as they are."""
    real = int(problem.query_start_loc[-1])
    out = torch.full_like(problem.query, 7.0, memory_format=torch.contiguous_format)
    lse = torch.full(out.shape[:2], 7.0)
    kernels.run(problem, out=out, lse=lse)
    expected, expected_lse = attention(problem)
    # The sum of weight * |value|, of which each rounded weight changes at most its share.
    size, _ = attention(replace(problem, value=problem.value.abs()))
    step = ROUNDING[problem.query.dtype]
    allowed = step * (expected.abs() + size) + 1e-5
    off = (out.double() - expected).abs()[:real]
    assert (off <= allowed[:real]).all(), f"off by {float((off - allowed[:real]).max()):.3g} more than allowed"
    torch.testing.assert_close(lse[:real].double(), expected_lse[:real], rtol=1e-6, atol=1e-5)
    assert (out[real:] == 7.0).all()
    assert (lse[real:] == 7.0).all()


def paged(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], heads: int = 2, kv_heads: int = 1, **more: object) -> Case:
    given = {"head_size": 64, "dtype": torch.float16, "layout": "NHD"} | more
    return Case(q_lens, kv_lens, heads, kv_heads, page_size=PAGE, **given)  # type: ignore[arg-type]


CASES = {
    "prefill": paged((130, 100), (130, 100)),
    "four pages a step": paged((9,), (1100,), heads=1),
    "chunk on a context": paged((140, 9), (700, 128), heads=1),
    "decode": paged((1, 1, 1), (1, 129, 700), 4, 2),
    "several tokens": paged((2, 8, 2), (130, 300, 2), 4, 2),
    "mixed": paged((1, 20, 1, 0, 3), (300, 148, 5, 60, 3), 4, 2),
    "bf16": paged((1, 40), (200, 168), dtype=torch.bfloat16),
    "128 numbers a head": paged((1, 30), (140, 158), head_size=128),
    "96 numbers a head": paged((1, 30), (140, 158), head_size=96),
    "192 numbers a head": paged((1, 70), (140, 158), head_size=192),
    "256 numbers a head": paged((1, 70), (140, 158), head_size=256),
    "16 heads share keys": paged((1, 3), (150, 140), 16, 1),
    "four pages a step of 20 heads": paged((1,), (1100,), 20, 1, head_size=128),
    "one head": paged((1,), (260,), 1, 1),
    "full": paged((30, 1, 5), (130, 128, 400), causal=False),
    "window": paged((150, 1, 4), (500, 700, 130), window=(300, -1)),
    "narrow window": paged((150, 1, 4), (500, 700, 130), window=(40, -1)),
    "window of one key": paged((20, 1), (150, 129), window=(0, -1)),
    "padding": paged((3, 40), (9, 140), padding=5),
    "more queries than keys": paged((12, 5), (4, 0)),
    "separate halves of a page": paged((1, 30), (140, 158), layout="HND"),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name: str) -> None:
    assert_right(CASES[name].build())


@pytest.mark.parametrize(("part", "number"), [("key", math.nan), ("key", math.inf), ("query", math.nan)])
@pytest.mark.parametrize("name", ["prefill", "four pages a step", "decode", "mixed"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
def test_nan_and_infinity(name: str, part: str, number: float) -> None:
    """In the first key of a sequence, which all of its rows see, or in one query."""
    case = CASES[name]
    one = Broken(part, number, 0, 0, 0, 5)
    problem = one.put(case.build())
    out, lse = kernels.run(problem, return_lse=True)
    assert lse is not None
    not_finite.check(problem, out, lse, one.beside(problem), (0, 2**-8), (1e-6, 1e-5))


def drawn(draw: st.DrawFn, q_lens: tuple[int, ...], context: int, groups: tuple[tuple[int, int], ...]) -> Case:
    """A batch on contexts of up to ``context`` keys; ``groups``: KV heads and query heads of each, to choose from."""
    kv_lens = tuple(q_len + draw(st.one_of(st.just(0), st.integers(0, context))) for q_len in q_lens)
    kv_heads, group = draw(st.sampled_from(groups))
    causal = draw(st.booleans())
    # Narrow windows, whose two edges share a page, and wide ones.
    window = draw(st.one_of(st.just(-1), st.integers(0, 300), st.integers(0, context))) if causal else -1
    return paged(
        q_lens,
        kv_lens,
        kv_heads * group,
        kv_heads,
        head_size=draw(st.sampled_from([64, 64, 96, 128])),
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16])),
        causal=causal,
        window=(window, -1),
        padding=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=5)
@given(data=st.data())
def test_random_prefill(data: st.DataObject) -> None:
    """Ragged prompts and chunks of them on longer contexts, with ends inside of pages. Pages are shuffled."""
    draw = data.draw
    q_lens = tuple(draw(st.lists(st.integers(9, 140), min_size=1, max_size=2)))
    assert_right(drawn(draw, q_lens, 700, ((1, 1), (2, 1), (1, 2))).build())


@settings(max_examples=8)
@given(data=st.data())
def test_random_decoding(data: st.DataObject) -> None:
    """1 to 8 tokens on contexts of many parts, 1 to 16 query heads per KV head."""
    draw = data.draw
    q_lens = tuple(draw(st.lists(st.sampled_from([1, 1, 1, 2, 3, 5, 8]), min_size=1, max_size=3)))
    assert_right(drawn(draw, q_lens, 1500, ((1, 1), (2, 1), (3, 1), (2, 2), (1, 4), (2, 4), (1, 7), (1, 16))).build())


@settings(max_examples=3)
@given(data=st.data())
def test_random_mixed_batches(data: st.DataObject) -> None:
    draw = data.draw
    few = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    q_lens = tuple(draw(st.permutations([*few, draw(st.integers(9, 140)), *draw(st.sampled_from([[], [0]]))])))
    assert_right(drawn(draw, q_lens, 500, ((1, 1), (2, 1), (1, 2))).build())


@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_more_programs_than_one_launch_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_work, "MAX_PROGRAMS", 4)
    monkeypatch.setattr(kernels, "on_device", device_work.on_device.__wrapped__)  # without what earlier tests kept
    launches, launch = [], kernels._launch
    monkeypatch.setattr(
        kernels, "_launch", lambda one, grid, **more: (launches.append(grid), launch(one, grid, **more))
    )
    assert_right(CASES[name].build())
    assert len(launches) > 3
    assert all(torch.Size(grid).numel() <= 4 for grid in launches)


def test_long_scores_do_not_overflow() -> None:
    """Scores of a thousand: hidden keys stay hidden, and the largest weight is 1."""
    assert_right(paged((40, 1), (200, 300), scale=20.0).build())


def test_the_result_is_allocated_if_it_is_not_given() -> None:
    problem = paged((3, 1), (9, 140)).build()
    out, lse = kernels.run(problem, return_lse=True)
    expected, expected_lse = attention(problem)
    assert float((out.double() - expected).abs().max()) < 2**-8
    assert lse is not None
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"softcap": 5.0}, "soft cap"),
        ({"head_size": 80}, "head size is 80"),
        ({"dtype": torch.float32}, "--dtype bfloat16"),
        ({"alibi": "shared"}, "ALiBi"),
        ({"sinks": 0.0}, "sinks"),
        ({"causal": False, "window": (5, -1)}, "window without a causal mask"),
        ({"kv_dtype": torch.int8}, "keys are torch.int8"),
        ({"num_heads": 65}, "65 query heads"),
        ({"page_size": 16}, "--block-size 128"),
        ({"page_size": 0}, "pages only"),
    ],
)
def test_refusals_name_the_value(changes: dict[str, object], sentence: str) -> None:
    case = replace(paged((2,), (9,)), **changes)
    with pytest.raises(ValueError, match=sentence):
        kernels.run(case.build())
