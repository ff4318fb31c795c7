"""bf16 queries over 8-bit caches. AMX widens these to bf16: on the way to tile registers or, with many rows, before."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.problem import AttentionProblem
from tests.attention import oracle
from tests.attention.cpu.test_attention import BF16, E4M3, E5M2, FEATURES, check, each_isa
from tests.attention.isa import set_isa
from tests.attention.oracle import Case

INT8 = torch.int8
KV_DTYPES = pytest.mark.parametrize("kv_dtype", [INT8, E4M3, E5M2], ids=str)


def case(kv_dtype: torch.dtype, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], **changes: object) -> Case:
    """bf16 over this cache: int8 with factors of rows, fp8 with scales."""
    stored = {"row_factors": True} if kv_dtype == INT8 else {"kv_dtype": kv_dtype, "key_scale": 0.1, "value_scale": 3.0}
    return Case(q_lens, kv_lens, dtype=BF16, **(stored | changes))  # type: ignore[arg-type]


def test_scales_whose_product_is_too_small_for_fp32() -> None:
    """All scores are 0. Masked ones must not become 0 times infinity."""
    check(case(E4M3, (1,), (40,), num_heads=8, num_kv_heads=1, head_size=64, scale=1e-30, key_scale=1e-20))


# One token of up to 64 query heads per KV head, as in decoding.
@KV_DTYPES
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("rows", range(3, 66))
def test_every_number_of_rows(rows: int, page_size: int, kv_dtype: torch.dtype) -> None:
    kv_lens = (1, 31, 64 + rows, 300 - rows)
    check(case(kv_dtype, (1,) * 4, kv_lens, num_heads=2 * rows, head_size=64, page_size=page_size))


@KV_DTYPES
@pytest.mark.parametrize("page_size", [0, 16, 17, 128])
@pytest.mark.parametrize("rows", [5, 8, 16, 17, 33, 64, 129, 270])
@pytest.mark.parametrize("head_size", [32, 80, 96, 256])
def test_many_tokens_of_every_head_size(head_size: int, rows: int, page_size: int, kv_dtype: torch.dtype) -> None:
    """Each row sees one key more than the one before it. 270 rows: the last of two blocks has 14."""
    kv_lens = (rows, rows + 33, rows + 256 - rows % 2)
    check(case(kv_dtype, (rows,) * 3, kv_lens, num_heads=2, head_size=head_size, page_size=page_size))


@KV_DTYPES
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16])
def test_a_few_tokens(group: int, kv_dtype: torch.dtype) -> None:
    q_lens = tuple(range(1, 9))
    kv_lens = tuple(q_len + (0, 150, 15, 31, 128, 2, 77, 300)[q_len - 1] for q_len in q_lens)
    check(case(kv_dtype, q_lens, kv_lens, num_heads=2 * group, head_size=96, page_size=16 + group % 2))


@KV_DTYPES
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature(feature: str, kv_dtype: torch.dtype) -> None:
    changes = {"num_heads": 12, "head_size": 96} | FEATURES[feature]
    check(case(kv_dtype, (1, 3, 10, 30), (259, 140, 75, 301), **changes))


@KV_DTYPES
@pytest.mark.parametrize("left", [0, 1, 30, 63, 200])
@pytest.mark.parametrize("group", [5, 8, 40, 64])
def test_windows_begin_anywhere(group: int, left: int, kv_dtype: torch.dtype) -> None:
    kv_lens = (17, 128, 131, 300, 301)
    check(case(kv_dtype, (1, 1, 2, 1, 3), kv_lens, num_heads=2 * group, head_size=64, window=(left, -1)))


@KV_DTYPES
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(scale: float, kv_dtype: torch.dtype) -> None:
    check(case(kv_dtype, (1, 3), (300, 77), num_heads=16, scale=scale))


def with_one_key_each(kv_dtype: torch.dtype, rows: int, head_size: int) -> tuple[AttentionProblem, torch.Tensor]:
    """A problem of 256 sequences and the 256 codes. The rows of a sequence are the heads of one token."""
    lens = (1,) * 256
    problem = Case(lens, lens, rows, 1, head_size, 0, BF16, causal=False, scale=1024.0).build()
    zeros = torch.zeros(256, 1, head_size).to(kv_dtype)
    problem = replace(problem, key=zeros, value=zeros.clone(), kv_start_loc=torch.arange(256, dtype=torch.int32))
    if kv_dtype == INT8:
        factors = 2.0 ** (torch.arange(256) % 5 - 2)[:, None]
        problem = replace(problem, key_factors=factors, value_factors=factors.flip(0))
    return problem, torch.arange(256, dtype=torch.uint8).view(kv_dtype)


@KV_DTYPES
@pytest.mark.parametrize("rows", [1, 5, 8, 16, 17, 40, 129])
@pytest.mark.parametrize("head_size", [32, 96, 256])
def test_every_code_is_widened_exactly_in_values(isa: str, head_size: int, rows: int, kv_dtype: torch.dtype) -> None:
    """Every code in every dimension. There is one key per sequence, so its weight is 1 and ``out`` is the value."""
    problem, codes = with_one_key_each(kv_dtype, rows, head_size)
    places = (torch.arange(256)[:, None] + torch.arange(head_size)) % 256
    value = codes.view(torch.uint8)[places].view(kv_dtype)[:, None]
    out, _ = cpu.run(replace(problem, value=value))
    expected = value.float()
    if problem.value_factors is not None:
        expected = expected * problem.value_factors[..., None]
    torch.testing.assert_close(out, expected.to(BF16).expand_as(out), rtol=0, atol=0, equal_nan=True)


@KV_DTYPES
@pytest.mark.parametrize("rows", [1, 5, 8, 16, 17, 40, 129])
@pytest.mark.parametrize("head_size", [32, 96, 256])
def test_every_code_is_widened_exactly_in_keys(isa: str, head_size: int, rows: int, kv_dtype: torch.dtype) -> None:
    """The key is 0 in all dimensions but one, in which the query is 1: ``lse`` is the score, 1024 times the code."""
    problem, codes = with_one_key_each(kv_dtype, rows, head_size)
    expected = codes.float()[:, None] * 1024
    # Plus infinity gives NaN in a softmax, as NaN does. Minus infinity makes a key invisible.
    expected = expected.masked_fill(expected == math.inf, math.nan)
    if problem.key_factors is not None:
        expected = expected * problem.key_factors
    for dim in (0, 7, 8, 15, 16, 31, head_size - 1):
        query, key = torch.zeros_like(problem.query), problem.key.clone()
        query[:, :, dim], key[:, 0, dim] = 1.0, codes
        _, lse = cpu.run(replace(problem, query=query, key=key), return_lse=True)
        assert lse is not None
        # Conversion to base 2 and back costs a unit in the last place, also for the weight 1, of which the shorter
        # exponential makes 1 - 8.6e-5. The smallest number gives 2^-6, and neighbours are 2^-6 or 2^19 units apart.
        torch.testing.assert_close(lse, expected.expand_as(lse), rtol=2**-22, atol=8.6e-5, equal_nan=True)


@KV_DTYPES
@pytest.mark.parametrize("rows", [8, 40])
def test_what_no_row_sees_does_not_matter(rows: int, kv_dtype: torch.dtype) -> None:
    """NaN before the window: zero times NaN would be NaN."""
    problem = case(kv_dtype, (1,), (300,), num_heads=rows, num_kv_heads=1, page_size=0, window=(70, -1)).build()
    assert problem.kv_start_loc is not None
    first = int(problem.kv_start_loc[0])
    unseen = slice(first, first + 229)
    for part in (problem.key, problem.value, problem.key_factors, problem.value_factors):
        if part is not None and part.dtype != INT8:
            part[unseen] = math.nan if part.dtype == torch.float32 else torch.tensor(math.nan).to(part.dtype)
    expected = oracle.attention(problem)
    for _ in each_isa():
        oracle.assert_matches(problem, *cpu.run(problem, return_lse=True), expected)


@pytest.mark.parametrize(("kv_dtype", "tokens"), [(INT8, 2), (E4M3, 2), (E5M2, 2), (INT8, 5)], ids=str)
def test_nan_in_a_value_reaches_only_panels_that_see_it(kv_dtype: torch.dtype, tokens: int) -> None:
    """Tokens of 32 rows, a panel each on AMX. One key is seen by the first only, and one by the last.

    Five tokens have so many rows that the cache is packed. There, NaN in fp8 also reaches other panels.
    """
    problem = case(kv_dtype, (tokens,), (300,), num_heads=32, num_kv_heads=1, page_size=0, window=(70, -1)).build()
    assert problem.kv_start_loc is not None
    before = cpu.isa()
    try:
        set_isa("amx") if "amx" in cpu.usable_isas() else pytest.skip("panels of other instruction sets are smaller")
        for position, token in ((299, tokens - 1), (230 - tokens, 0)):
            name = "value_factors" if kv_dtype == INT8 else "value"
            broken = getattr(problem, name).float().clone()
            broken[int(problem.kv_start_loc[0]) + position] = math.nan
            out, _ = cpu.run(replace(problem, **{name: broken.to(getattr(problem, name).dtype)}))
            assert out[token].isnan().all()
            assert out[[other for other in range(tokens) if other != token]].isfinite().all()
    finally:
        set_isa(before)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1], ids=hex)
@pytest.mark.parametrize("rows", [8, 40, 100])
def test_any_nan_as_a_factor_reaches_the_output(isa: str, rows: int, bits: int) -> None:
    """Rounding a weight to bf16 could carry a NaN into a number."""
    factor = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    problem = case(INT8, (2,), (300,), num_heads=rows, num_kv_heads=1, page_size=0).build()
    assert problem.kv_start_loc is not None
    first = int(problem.kv_start_loc[0])
    for name in ("key_factors", "value_factors"):
        factors = getattr(problem, name).clone()
        factors[first + 77] = factor
        out, _ = cpu.run(replace(problem, **{name: factors}))
        assert out.isnan().all()
    factors = problem.key_factors.clone()  # type: ignore[union-attr]
    factors[first + 299] = factor
    out, _ = cpu.run(replace(problem, key_factors=factors))
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@KV_DTYPES
@pytest.mark.parametrize("rows", [8, 40])
def test_rows_are_not_read_past_their_end(isa: str, rows: int, kv_dtype: torch.dtype) -> None:
    """There is NaN, or 127, on both sides of every row of K and V."""
    problem = case(kv_dtype, (1,), (140,), num_heads=rows, num_kv_heads=1, head_size=96, page_size=0).build()
    apart = []
    for cache in (problem.key, problem.value):
        wide = torch.full((*cache.shape[:2], 96 + 128), oracle.unused(kv_dtype), dtype=torch.float32).to(kv_dtype)
        wide[:, :, 64:-64] = cache
        apart.append(wide[:, :, 64:-64])
    expected = oracle.attention(problem)
    problem = replace(problem, key=apart[0], value=apart[1])
    oracle.assert_matches(problem, *cpu.run(problem, return_lse=True), expected)
