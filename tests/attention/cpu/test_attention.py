"""The CPU kernels against the float64 oracle."""

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
from tests.attention import oracle
from tests.attention.isa import set_isa
from tests.attention.oracle import Case

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

DECODE = {"q_lens": (1, 1, 1), "kv_lens": (1, 300, 77)}
PREFILL = {"q_lens": (150, 33), "kv_lens": (150, 33)}
CHUNKED = {"q_lens": (65, 9), "kv_lens": (300, 140)}
MIXED = {"q_lens": (1, 70, 0, 3, 1), "kv_lens": (259, 70, 40, 131, 16)}
SHAPES = {"decode": DECODE, "prefill": PREFILL, "chunked": CHUNKED, "mixed": MIXED}


def check(case: Case) -> None:
    """Compare every instruction set of this machine with one result of the oracle. Padding rows stay untouched."""
    problem = case.build()
    expected = oracle.attention(problem)
    real = int(problem.query_start_loc[-1])
    for _ in each_isa():
        out = torch.full(problem.query.shape, 7.0, dtype=problem.query.dtype)
        lse = torch.full(problem.query.shape[:2], 7.0)
        cpu.run(problem, out, lse)
        oracle.assert_matches(problem, out, lse, expected)
        assert (out[real:] == 7.0).all()
        assert (lse[real:] == 7.0).all()


def each_isa() -> Iterator[str]:
    before = cpu.isa()
    try:
        for name in cpu.usable_isas():
            set_isa(name)
            yield name
    finally:
        set_isa(before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("head_size", [8, 32, 64, 72, 80, 96, 112, 128, 192, 256])
def test_head_sizes_and_dtypes(shape: str, dtype: torch.dtype, head_size: int) -> None:
    check(Case(**SHAPES[shape], dtype=dtype, head_size=head_size))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 20, 130])
def test_query_heads_per_kv_head(shape: str, group: int) -> None:
    kv_heads = 1 if group > 8 else 2
    check(Case(**SHAPES[shape], num_heads=group * kv_heads, num_kv_heads=kv_heads, head_size=32))


@pytest.mark.parametrize("rows", [*range(1, 10), 12, 16, 17, 31, 33, 48, 49])
@pytest.mark.parametrize("head_size", [32, 96, 160, 256])
@pytest.mark.parametrize("tokens", [1, 2])
def test_any_few_rows_over_any_number_of_keys(rows: int, head_size: int, tokens: int) -> None:
    """Each number of rows has its own registers. Keys end in the middle of a pair, a page, a step and a tile.

    With a window, the keys of the second token begin in the middle of a pair, and end with a tile.
    """
    lens = [1, 2, 31, 33, 64, 113, 161]
    lens = [length for length in lens if length >= tokens]
    case = Case([tokens] * len(lens), lens, rows, 1, head_size, dtype=BF16)
    check(case)
    check(replace(case, window=(36, -1), softcap=3.0, sinks=1.0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [0, 1, 16, 17, 32, 784])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_page_sizes_and_layouts(shape: str, page_size: int, layout: str) -> None:
    check(Case(**SHAPES[shape], page_size=page_size, layout=layout, dtype=BF16, padding=3))


MASKS: dict[str, dict[str, object]] = {
    "non-causal": {"causal": False},
    "window left": {"window": (20, -1)},
    "window left, non-causal": {"causal": False, "window": (20, -1)},
    "window own position only": {"window": (0, -1)},
    "window left, one tile and more": {"window": (200, 0)},
    "window both, non-causal": {"causal": False, "window": (17, 40)},
    "window symmetric, non-causal": {"causal": False, "window": (32, 32)},
    "window right, non-causal": {"causal": False, "window": (-1, 3)},
    "window right is cut by causal": {"window": (-1, 5)},
    "softcap": {"softcap": 3.0, "scale": 1.0},
    "alibi": {"alibi": "shared"},
    "alibi per sequence, non-causal": {"alibi": "per sequence", "causal": False},
    "sinks": {"sinks": 4.0},
    "sinks, non-causal": {"sinks": 4.0, "causal": False},
    "all of it": {"alibi": "per sequence", "softcap": 30.0, "window": (90, -1), "sinks": 2.0},
    "all of it, non-causal": {"alibi": "shared", "softcap": 5.0, "window": (60, 25), "sinks": 1.0, "causal": False},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("group", [1, 4])
def test_masks(shape: str, mask: str, group: int) -> None:
    check(Case(**SHAPES[shape], num_heads=2 * group, **MASKS[mask]))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_in_bf16(mask: str, shape: str) -> None:
    check(Case(**SHAPES[shape], num_heads=8, dtype=BF16, **MASKS[mask]))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("group", [3, 8])
def test_masks_in_fp16(group: int, mask: str, shape: str) -> None:
    """AMX computes fp16 from 7 rows on: one decode token of 8 heads, or three tokens of 3 heads."""
    check(Case(**SHAPES[shape], num_heads=2 * group, dtype=F16, **MASKS[mask]))  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", MASKS)
def test_masks_over_several_row_blocks(mask: str) -> None:
    """A block has 256 rows. The tokens end at a column step, so that no panel needs a mask at its end."""
    check(Case((320,), (320,), 2, 2, head_size=32, **MASKS[mask]))  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", ["non-causal", "window left", "alibi", "all of it"])
@pytest.mark.parametrize(("q_len", "kv_heads", "group"), [(700, 64, 1), (600, 128, 1), (200, 128, 6)])
@pytest.mark.parametrize("dtype", [pytest.param(F16, marks=pytest.mark.more), BF16], ids=str)
def test_masks_over_large_row_blocks(dtype: torch.dtype, mask: str, q_len: int, kv_heads: int, group: int) -> None:
    """AMX uses blocks of 512 rows and more for long sequences. Panels of 32 rows can begin within a group of 6."""
    lens = ((q_len, 3), (q_len + 40, 200))
    check(Case(*lens, kv_heads * group, kv_heads, head_size=32, dtype=dtype, **MASKS[mask]))  # type: ignore[arg-type]


# Kernels differ by the number of query rows per KV head and by whether the head size is a multiple of 32: up to 2, 4,
# 6, 8 or 16 rows, up to 40 or 64, and more. Panels have 12, 16 or 32 rows, blocks 256 and more.
@pytest.mark.parametrize("page_size", [0, 1, 16, 17, 784])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 40, 64, 65, 100, 270])
@pytest.mark.parametrize("head_size", [8, 64, 72, 80, 96, 128, 256])
def test_bf16_at_any_number_of_rows(head_size: int, rows: int, page_size: int) -> None:
    """Odd and even numbers of tokens, in one tile and in several; pages that are a multiple of 16 rows, and others."""
    kv_lens = (rows, rows + 33, rows + 256 - rows % 2)
    check(Case((rows,) * 3, kv_lens, 2, 2, head_size, page_size, dtype=BF16))


# As above for fp16. AMX begins at 7 rows and packs from 49 rows on (from 33 if the head size is not a multiple of 32).
# Without AMX, packing begins at 41 rows.
@pytest.mark.parametrize("page_size", [0, 1, 16, 17, 784])
@pytest.mark.parametrize("rows", [1, 6, 7, 8, 9, 16, 17, 30, 32, 33, 40, 41, 48, 49, 100, 270])
@pytest.mark.parametrize("head_size", [8, 32, 72, 80, 96, 128, 256])
def test_fp16_at_any_number_of_rows(head_size: int, rows: int, page_size: int) -> None:
    kv_lens = (rows, rows + 33, rows + 256 - rows % 2)
    check(Case((rows,) * 3, kv_lens, 2, 2, head_size, page_size, dtype=F16))


@pytest.mark.parametrize("head_size", [64, 80])
@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_a_few_tokens_for_every_group(dtype: torch.dtype, group: int, head_size: int) -> None:
    q_lens = tuple(range(1, 9))
    kv_lens = tuple(q_len + (0, 150, 15, 31, 128, 2, 77, 300)[q_len - 1] for q_len in q_lens)
    check(Case(q_lens, kv_lens, 2 * group, 2, head_size, dtype=dtype, page_size=16 + group % 2))


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_scales_that_are_not_positive(shape: str, dtype: torch.dtype, scale: float) -> None:
    check(Case(**SHAPES[shape], dtype=dtype, scale=scale))
    check(Case(**SHAPES[shape], dtype=dtype, scale=scale, softcap=2.0, alibi="shared"))


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 40, 100])
@pytest.mark.parametrize("head_size", [64, 72])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rows_after_the_last_token_are_ignored(isa: str, dtype: torch.dtype, head_size: int, rows: int) -> None:
    """Tiles are padded to whole steps with tokens of weight 0, and 0 times infinity would be NaN."""
    if isa == "amx" and dtype == BF16 and head_size % 32 == 0 and 3 <= rows <= 64:
        pytest.skip("infinity reaches the neighbouring dimension with AMX direct (kernels/cpu/README.md, Limits)")
    for kv_len in (17, 129, 300):
        problem = Case((rows,), (kv_len,), 1, 1, head_size, page_size=0, dtype=dtype, causal=False).build()
        problem.value[int(problem.kv_start_loc[0]) + kv_len - 1] = math.inf  # type: ignore[index]
        out, _ = cpu.run(problem)
        assert (out == math.inf).all()


@pytest.mark.parametrize("rows", [1, 8, 40, 100])
@pytest.mark.parametrize("broken", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_nan_and_infinity_stay_within_their_pair_of_dimensions(
    isa: str, dtype: torch.dtype, broken: float, rows: int
) -> None:
    """With few rows, AMX multiplies the neighbouring dimension by 0, so infinity may become NaN there and nowhere else.

    In fp16 only the dimension itself becomes NaN, because infinity has no second part.
    """
    problem = Case((rows,), (300,), 1, 1, page_size=0, dtype=dtype, causal=False).build()
    problem.value[int(problem.kv_start_loc[0]) + 77, 0, 5] = broken  # type: ignore[index]
    out, _ = cpu.run(problem)
    assert not out[..., 5].isfinite().any()
    assert out[..., : 5 if dtype == F16 else 4].isfinite().all()
    assert out[..., 6:].isfinite().all()


@pytest.mark.parametrize("q_len", [1, 8, 16, 40])
@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_nan_and_infinity_in_an_fp16_key_reach_every_row_that_sees_it(isa: str, broken: float, q_len: int) -> None:
    problem = Case((q_len,), (300,), 2, 2, page_size=0, dtype=F16).build()
    problem.query[:, 0, 3] = 1.0
    position = 300 - q_len // 2 - 1
    problem.key[int(problem.kv_start_loc[0]) + position, 0, 3] = broken  # type: ignore[index]
    out, _ = cpu.run(problem)
    sees = torch.arange(q_len) + 300 - q_len >= position
    assert out[sees, 0].isnan().all()
    assert out[~sees].isfinite().all()
    assert out[:, 1].isfinite().all()


@pytest.mark.parametrize("rows", [1, 8, 40, 100])
@pytest.mark.parametrize("head_size", [8, 24, 40, 72, 80, 96, 128])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_rows_are_not_read_past_their_end(isa: str, dtype: torch.dtype, head_size: int, rows: int) -> None:
    """There is NaN on both sides of every row of K and V, because zero times NaN would be NaN."""
    problem = Case((rows,), (140,), 1, 1, head_size, page_size=0, dtype=dtype, causal=False).build()
    apart = []
    for cache in (problem.key, problem.value):
        wide = torch.full((*cache.shape[:2], head_size + 128), math.nan, dtype=dtype)
        wide[:, :, 64:-64] = cache
        apart.append(wide[:, :, 64:-64])
    expected = oracle.attention(problem)
    problem = replace(problem, key=apart[0], value=apart[1])
    oracle.assert_matches(problem, *cpu.run(problem, return_lse=True), expected)


@pytest.mark.parametrize(("rows", "head_size"), [(1, 128), (3, 64), (8, 64), (40, 128), (40, 80), (128, 64), (128, 80)])
@pytest.mark.parametrize("cache", [{}, {"kv_dtype": E4M3}, {"row_factors": True}], ids=["bf16", "e4m3", "int8"])
def test_errors_of_bf16_weights_are_those_of_rounding(cache: dict[str, Any], rows: int, head_size: int) -> None:
    """Checks for systematic errors, which the bound per element cannot see.

    A number rounded to bf16 is off by up to half a unit in the last place, that is 2^-8 of its power of two, uniformly
    distributed. Its significand m has density proportional to 1 / m over [1, 2]. The mean square of the relative error
    is therefore 2^-16 / 3 times the mean of 1 / m^2, which is 3 / (8 ln 2). The output is rounded once, and each weight
    once: error^2 = rounding^2 * (out^2 + sum (weight * value)^2).
    """
    rounding = math.sqrt(2**-16 / 3 * 3 / (8 * math.log(2)))
    lens = ((rows,) * 24, (200,) * 24)
    problem = Case(*lens, 2, 2, head_size, page_size=0, dtype=BF16, causal=False, **cache).build()
    expected, _ = oracle.attention(problem)
    assert problem.kv_start_loc is not None
    wide_key = oracle.widened(problem.key, problem.key_factors)
    wide_value = oracle.widened(problem.value, problem.value_factors)
    variance = torch.empty_like(expected)
    for seq, start in enumerate(problem.kv_start_loc.tolist()):
        own, keys = slice(seq * rows, (seq + 1) * rows), slice(start, start + 200)
        score = torch.einsum("qhd,khd->hqk", problem.query[own].double(), wide_key[keys])
        weight = (score * problem.scale).softmax(2)
        variance[own] = torch.einsum("hqk,khd->qhd", weight**2, wide_value[keys] ** 2)
    for isa in each_isa():
        error = cpu.run(problem)[0].double() - expected
        size = expected**2
        if oracle.weight_rounding(problem).any():
            size = size + variance
        elif cache:
            continue  # all in fp32, which the bf16 cache shows
        rms = float((error**2 / (rounding**2 * size)).mean().sqrt())
        assert 0.85 < rms < 1.15, f"{isa}: errors are {rms:.3f} times the expected rounding errors"
        # The mean error of all outputs. It would be two roundings if weights were truncated.
        common = float((error * expected).sum() / (expected**2).sum())
        assert abs(common) < rounding / 8, f"{isa}: outputs are {common:.2e} too large on average"


FEATURES = MASKS | {
    "one query head per KV head": {"num_heads": 2},
    "five": {"num_heads": 10},
    "eight, one KV head": {"num_heads": 8, "num_kv_heads": 1},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 112, 128, 192, 256])
def test_every_feature_at_every_head_size(feature: str, dtype: torch.dtype, head_size: int) -> None:
    """Each feature with a decode step, a few query tokens at once (direct panels) and a prefill (packed panels)."""
    case = Case(q_lens=(1, 3, 40), kv_lens=(259, 140, 75), dtype=dtype, head_size=head_size)
    check(replace(case, **FEATURES[feature]))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sinks", [0.0, 30.0, -30.0, 1e4, -1e4, 1e30, -1e30])
def test_sinks_of_any_size(shape: str, sinks: float) -> None:
    check(Case(**SHAPES[shape], sinks=sinks))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sink_of_minus_infinity_changes_no_bit(isa: str, shape: str) -> None:
    problem = Case(**SHAPES[shape], sinks=-math.inf).build()
    out, lse = cpu.run(problem, return_lse=True)
    expected_out, expected_lse = cpu.run(replace(problem, sinks=None), return_lse=True)
    assert torch.equal(out, expected_out)
    assert torch.equal(lse, expected_lse)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [True, False])
def test_more_queries_than_keys(causal: bool) -> None:
    """The first rows are before position 0, so with a causal mask they see no key."""
    check(Case(q_lens=(40, 5), kv_lens=(7, 0), causal=causal))


def test_rows_that_see_nothing_are_zero_with_lse_minus_infinity() -> None:
    problem = Case(q_lens=(3, 2), kv_lens=(0, 1)).build()
    out, lse = cpu.run(problem, return_lse=True)
    assert lse is not None
    assert (out[:4] == 0).all()
    assert (lse[:4] == -math.inf).all()
    assert torch.isfinite(lse[4]).all()


def test_rows_that_see_nothing_but_a_sink_are_zero_with_the_sink_as_lse(isa: str) -> None:
    problem = Case(q_lens=(3, 2), kv_lens=(0, 1), sinks=2.0).build()
    out, lse = cpu.run(problem, return_lse=True)
    assert lse is not None
    assert problem.sinks is not None
    assert (out[:4] == 0).all()
    assert (lse[:4] == problem.sinks).all()
    assert (out[4] != 0).any()


@pytest.mark.parametrize("kv_dtype", [F32, F16, BF16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_cache_in_another_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check(Case(**MIXED, dtype=dtype, kv_dtype=kv_dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("head_size", [8, 24, 64, 72, 128, 192, 256])
def test_fp8_caches_at_every_shape(shape: str, kv_dtype: torch.dtype, head_size: int) -> None:
    for dtype in (F32, BF16):
        check(
            Case(**SHAPES[shape], dtype=dtype, kv_dtype=kv_dtype, head_size=head_size, key_scale=0.02, value_scale=1.7)
        )


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("page_size", [0, 1, 16, 17, 784])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_fp8_caches_in_every_layout(kv_dtype: torch.dtype, page_size: int, layout: str) -> None:
    for dtype in (F32, BF16):
        check(Case(**MIXED, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size, layout=layout, padding=3))


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_fp8_caches_with_every_feature(feature: str, kv_dtype: torch.dtype) -> None:
    case = Case((1, 3, 40), (259, 140, 75), kv_dtype=kv_dtype, head_size=80, key_scale=0.1, value_scale=3.0)
    for dtype in (F32, BF16):
        check(replace(case, dtype=dtype, **FEATURES[feature]))  # type: ignore[arg-type]


@pytest.mark.parametrize("q_len", [1, 20])
@pytest.mark.parametrize("head_size", [8, 24, 256])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=str)
def test_every_fp8_code_is_widened_exactly(isa: str, kv_dtype: torch.dtype, head_size: int, q_len: int) -> None:
    """There is one key per sequence, so its weight is 1, ``out`` is the value and ``lse`` is the score."""
    codes = torch.arange(256, dtype=torch.uint8).view(kv_dtype)
    rows = codes.repeat(-(-head_size // 256) * head_size)[: 256 * head_size].view(256, 1, head_size)
    problem = Case((q_len,) * 256, (1,) * 256, 1, 1, head_size, page_size=0, causal=False, scale=1.0).build()
    starts = torch.arange(256, dtype=torch.int32)
    problem = replace(problem, value=rows, kv_start_loc=starts)

    out, _ = cpu.run(replace(problem, query=problem.query * 0, key=torch.zeros(256, 1, head_size).to(kv_dtype)))
    expected = rows.float().repeat_interleave(q_len, 0)
    assert expected.isnan().any()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)

    for dim in (0, head_size - 1):
        query, key = torch.zeros(256 * q_len, 1, head_size), torch.zeros(256, 1, head_size).to(kv_dtype)
        query[:, 0, dim], key[:, 0, dim] = 1.0, codes
        _, lse = cpu.run(replace(problem, query=query, key=key), return_lse=True)
        # Minus infinity makes a key invisible. Plus infinity gives NaN in a softmax, as NaN does.
        expected = codes.float().masked_fill(codes.float() == math.inf, math.nan).repeat_interleave(q_len)[:, None]
        # Conversion to base 2 and back costs a unit in the last place. Neighbouring codes are 2^19 units apart.
        torch.testing.assert_close(lse, expected, rtol=2**-22, atol=0, equal_nan=True)


@pytest.mark.parametrize("q_len", [1, 2, 4, 7, 20])
@pytest.mark.parametrize("head_size", [8, 80, 96, 128])
def test_a_bf16_cache_is_widened_exactly(isa: str, head_size: int, q_len: int) -> None:
    """All 65536 numbers as values, side by side. With one key per sequence the weight is 1, so ``out`` is the value."""
    count = -(-65536 // head_size)
    codes = torch.arange(count * head_size, dtype=torch.int32).to(torch.int16)
    rows = codes.view(BF16).view(head_size, count).t().contiguous().view(count, 1, head_size)
    problem = Case((q_len,) * count, (1,) * count, 1, 1, head_size, page_size=0, causal=False).build()
    starts = torch.arange(count, dtype=torch.int32)
    out, _ = cpu.run(replace(problem, key=torch.zeros_like(rows), value=rows, kv_start_loc=starts))
    expected = rows.float().repeat_interleave(q_len, 0)
    assert expected.isnan().any()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("q_len", [1, 7, 8, 16, 20, pytest.param(60, marks=pytest.mark.more)])
@pytest.mark.parametrize("head_size", [32, 80, 128])
def test_every_fp16_number_counts_exactly(isa: str, head_size: int, q_len: int) -> None:
    """All numbers as values, in keys and in queries. AMX splits each into a sum of two; neither part may be lost."""
    count = -(-65536 // head_size)
    codes = torch.randperm(65536, generator=torch.Generator().manual_seed(0)).to(torch.int16)
    rows = codes.repeat(2)[: count * head_size].view(F16).view(count, 1, head_size)
    problem = Case((q_len,) * count, (1,) * count, 1, 1, head_size, 0, F16, causal=False, scale=4096.0).build()
    problem = replace(problem, kv_start_loc=torch.arange(count, dtype=torch.int32))
    nothing = torch.zeros_like(rows)
    out, _ = cpu.run(replace(problem, key=nothing, value=rows))
    expected = rows.repeat_interleave(q_len, 0)
    assert torch.equal(out[expected.isfinite()], expected[expected.isfinite()])
    assert not out[~expected.isfinite()].isfinite().any()

    finite = rows.masked_fill(~rows.isfinite(), 0.0)
    for dim in (0, 20, head_size - 1):
        one = torch.zeros_like(rows)
        one[:, 0, dim] = 1.0
        for query, key in ((one, finite), (finite, one)):
            asked = replace(problem, query=query.repeat_interleave(q_len, 0), key=key, value=nothing)
            _, lse = cpu.run(asked, return_lse=True)
            # Conversion to base 2 and back costs a unit in the last place, also for the weight 1. The smallest number
            # gives 2^-12, and neighbours are 2^13 units apart.
            score = 4096.0 * finite[:, :, dim].float().repeat_interleave(q_len, 0)
            torch.testing.assert_close(lse, score, rtol=2**-22, atol=2**-22)


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("q_len", [1, 20])
def test_scales_of_an_fp8_cache_are_factors_of_keys_and_values(isa: str, kv_dtype: torch.dtype, q_len: int) -> None:
    """The scales are powers of two, so nothing rounds: results equal those over a cache that holds the product."""
    problem = Case((q_len, 1), (2500, 70), kv_dtype=kv_dtype, sinks=3.0, key_scale=0.25, value_scale=8.0).build()
    out, lse = cpu.run(problem, return_lse=True)
    wide = replace(problem, key=problem.key.float() * 0.25, value=problem.value.float() * 8.0)
    expected_out, expected_lse = cpu.run(replace(wide, key_scale=1.0, value_scale=1.0), return_lse=True)
    assert torch.equal(out, expected_out)
    assert torch.equal(lse, expected_lse)  # type: ignore[arg-type]


@pytest.mark.parametrize("q_len", [1, 4, 20])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("page_size", [16, 784])
def test_long_sequences_are_split_and_merged(q_len: int, num_kv_heads: int, page_size: int) -> None:
    case = Case((q_len, 1), (5000, 2100), 2 * num_kv_heads, num_kv_heads, head_size=40, page_size=page_size)
    check(case)
    check(replace(case, dtype=F16, window=(1777, -1)))
    check(replace(case, dtype=F16, head_size=64))
    check(replace(case, dtype=BF16))
    check(replace(case, dtype=BF16, head_size=64, window=(1777, -1)))
    # has about as much weight as all 5000 tokens, so counting it twice or never would show
    check(replace(case, sinks=9.0))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("kv_len", [1000, 2500])
def test_scores_that_grow_along_the_sequence(isa: str, kv_len: int, dtype: torch.dtype) -> None:
    """Each tile raises the running maximum a lot, so all earlier sums must be rescaled.

    This happens both within a split (the first takes 512 tokens) and across splits.
    """
    problem = Case((1, 3, 8, 40), (kv_len,) * 4, page_size=0, dtype=dtype).build()
    ramp = torch.linspace(-8, 8, kv_len)[:, None]
    for start in problem.kv_start_loc.tolist():  # type: ignore[union-attr]
        problem.key[start : start + kv_len, :, 0] = ramp
    for first_component in (20.0, -20.0):  # scores grow, scores shrink
        problem.query[:, :, 0] = first_component
        out, lse = cpu.run(problem, return_lse=True)
        # Scores of 25 have units of 2e-6; those of ordinary problems are about ten times smaller.
        oracle.assert_matches(problem, out, lse, oracle.attention(problem), slack=5)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("position", [0, 5, 20, 40, 60, 127, 250])
def test_one_score_far_above_the_others(isa: str, position: int, dtype: torch.dtype) -> None:
    """The large score may be in any vector of the tile. Relative to a lower score its weight would overflow."""
    problem = Case((1, 8, 40), (300,) * 3, page_size=0, dtype=dtype, causal=False).build()
    problem.query[:, :, 0] = 50.0
    for start in problem.kv_start_loc.tolist():  # type: ignore[union-attr]
        problem.key[start : start + 300, :, 0] = 0.0
        problem.key[start + position, :, 0] = 50.0
    out, lse = cpu.run(problem, return_lse=True)
    oracle.assert_matches(problem, out, lse, oracle.attention(problem), slack=5)


def test_huge_scores_do_not_overflow(isa: str) -> None:
    problem = Case((3, 30), (700, 700), scale=400.0).build()
    out, lse = cpu.run(problem, return_lse=True)
    assert torch.isfinite(out).all()
    expected_out, expected_lse = oracle.attention(problem)
    # In fp32, scores of several thousand have an absolute error of about 1e-3, which becomes a relative error of the
    # weights.
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-3)  # type: ignore[union-attr]
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=5e-3)


def test_pages_that_slid_out_of_the_window_are_never_read(isa: str) -> None:
    """vLLM frees these pages: a table entry may hold any number, and a page another request's rows, or NaN."""
    case = Case((1, 30), (700, 600), page_size=16, window=(100, -1))
    problem = case.build()
    expected = oracle.attention(problem)
    table = problem.block_table
    assert table is not None
    for seq, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        gone = (kv_len - q_len - 100) // 16
        assert gone > 20
        for page in table[seq, :gone].tolist():
            problem.key[page] = problem.value[page] = math.nan
        table[seq, :gone] = -1
    out, lse = cpu.run(problem, return_lse=True)
    oracle.assert_matches(problem, out, lse, expected)


@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("sinks", [None, 3.0])
def test_nan_and_infinity_in_the_data_reach_the_output(isa: str, sinks: float | None, q_len: int) -> None:
    """A broken model must not look healthy: rows that see a NaN become NaN, and no others do."""
    problem = Case((q_len,), (300,), num_heads=2, num_kv_heads=2, page_size=0, sinks=sinks).build()
    position = 300 - q_len // 2 - 1
    problem.key[problem.kv_start_loc[0] + position, 0, 3] = math.nan  # type: ignore[index]
    out, _ = cpu.run(problem)
    sees = torch.arange(q_len) + 300 - q_len >= position
    assert out[sees, 0].isnan().all()
    assert out[~sees].isfinite().all()
    assert out[:, 1].isfinite().all()

    problem = Case((q_len,), (300,), num_heads=2, num_kv_heads=2, page_size=0, sinks=sinks).build()
    problem.value[problem.kv_start_loc[0] + 7, 1, 5] = math.inf  # type: ignore[index]
    out, _ = cpu.run(problem)
    assert (out[:, 1, 5] == math.inf).all()
    assert out[:, 0].isfinite().all()

    problem = Case((q_len,), (300,), sinks=0.0).build()
    problem.sinks[3] = math.nan  # type: ignore[index]
    out, _ = cpu.run(problem)
    assert out[:, 3].isnan().all()
    assert out[:, :3].isfinite().all()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_keys_and_values_with_different_strides(isa: str, dtype: torch.dtype) -> None:
    problem = Case(**MIXED, layout="NHD", dtype=dtype).build()
    expected = oracle.attention(problem)
    separate = problem.value.transpose(1, 2).contiguous().transpose(1, 2)
    assert separate.stride() != problem.key.stride()
    oracle.assert_matches(problem, *cpu.run(replace(problem, value=separate), return_lse=True), expected)


def test_a_block_table_that_is_part_of_a_wider_one(isa: str) -> None:
    problem = Case(**MIXED).build()
    assert problem.block_table is not None
    wide = torch.nn.functional.pad(problem.block_table, (2, 5), value=-1)
    part = wide[:, 2:-5]
    oracle.assert_matches(
        problem, *cpu.run(replace(problem, block_table=part), return_lse=True), oracle.attention(problem)
    )


def test_lse_may_have_any_strides() -> None:
    problem = Case(**MIXED).build()
    lse = torch.zeros(4, problem.query.shape[0]).T
    out, same = cpu.run(problem, lse=lse)
    assert same is lse
    oracle.assert_matches(problem, out, lse, oracle.attention(problem))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    group = draw(st.integers(1, 8))
    num_kv_heads = draw(st.integers(1, 3))
    lens = draw(
        st.lists(
            st.tuples(st.integers(0, 60) | st.just(1), st.integers(0, 400) | st.integers(0, 3)), min_size=1, max_size=5
        )
    )
    fresh = draw(st.booleans())  # vLLM's case: the keys of all query tokens are in the cache as well
    # Mostly bf16 or fp16 throughout, as in models, because kernels differ most there.
    kv_dtype = draw(st.sampled_from([None] * 5 + [F32, F16, BF16, E4M3, E5M2]))
    scales = st.sampled_from([1.0, 0.02, 0.7, 5.0]) if kv_dtype in (E4M3, E5M2) else st.just(1.0)
    return Case(
        q_lens=tuple(q for q, _ in lens),
        kv_lens=tuple(kv + q if fresh else kv for q, kv in lens),
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_size=8 * draw(st.integers(1, 32) | st.sampled_from([8, 12, 16])),
        page_size=draw(st.sampled_from([0, 1, 3, 8, 16, 32, 100, 784])),
        dtype=draw(st.sampled_from([F32, F16, F16, BF16, BF16])),
        kv_dtype=kv_dtype,
        key_scale=draw(scales),
        value_scale=draw(scales),
        layout=draw(st.sampled_from(["HND", "NHD"])),
        causal=draw(st.booleans()),
        window=draw(st.tuples(st.integers(-1, 150), st.integers(-1, 150)) | st.just((-1, -1))),
        softcap=draw(st.sampled_from([0.0, 0.0, 5.0, 50.0])),
        alibi=draw(st.sampled_from(["", "", "shared", "per sequence"])),
        sinks=draw(st.sampled_from([None, None, 0.0, 5.0, -5.0, 100.0, -1e4, 1e30, -math.inf])),
        padding=draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 1 << 30)),
    )


@settings(max_examples=250, deadline=None)
@given(case=cases())
def test_drawn_problems(case: Case) -> None:
    check(case)


@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_instruction_sets_agree(case: Case) -> None:
    """Tighter than the oracle's bound for fp16 and bf16: results computed to fp32 agree within rounding noise."""
    problem = replace(case.build(), alibi_slopes=None)
    problem = replace(problem, query=problem.query.float())
    results = [cpu.run(problem)[0][: int(problem.query_start_loc[-1])] for _ in each_isa()]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=4e-6)
