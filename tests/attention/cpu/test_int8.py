"""int8 caches with a factor for each row: the CPU kernels against the float64 oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.cpu import kernels as cpu
from tests.attention.cpu.test_attention import FEATURES, MIXED, SHAPES, check
from tests.attention.cpu.test_write_kv import _interesting
from tests.attention.oracle import Case, rounded_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def int8_cache(blocks: int, page: int, heads: int, size: int) -> tuple[torch.Tensor, ...]:
    """Keys, values and the factors of both, in one piece of memory, as in the pool of host layers."""
    of_head = page * (2 * size + 8)
    memory = torch.zeros(blocks, heads, of_head, dtype=torch.int8)
    rows = memory[:, :, : page * 2 * size].view(blocks, heads, page, 2 * size).transpose(1, 2)
    factors = memory[:, :, page * 2 * size :].view(torch.float32).view(blocks, heads, 2, page)
    return (*rows.chunk(2, dim=-1), *factors.permute(2, 0, 3, 1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [8, 24, 64, 80, 128, 192, 256])
def test_every_shape(shape: str, dtype: torch.dtype, head_size: int) -> None:
    check(Case(**SHAPES[shape], dtype=dtype, head_size=head_size, row_factors=True))


@pytest.mark.parametrize("page_size", [0, 1, 16, 17, 784])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_every_layout(page_size: int, layout: str) -> None:
    for dtype in DTYPES:
        check(Case(**MIXED, dtype=dtype, page_size=page_size, layout=layout, padding=3, row_factors=True))


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature(feature: str) -> None:
    case = Case((1, 3, 40), (259, 140, 75), head_size=80, row_factors=True)
    for dtype in DTYPES:
        check(replace(case, dtype=dtype, **FEATURES[feature]))  # type: ignore[arg-type]


LENGTHS = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 300)), min_size=1, max_size=4)


@settings(max_examples=60)
@given(
    lengths=LENGTHS,
    heads=st.tuples(st.integers(1, 3), st.integers(1, 9)),
    head_size=st.sampled_from([8, 40, 64, 96, 128]),
    page_size=st.sampled_from([0, 1, 7, 16, 32]),
    window=st.sampled_from([(-1, -1), (0, -1), (33, -1)]),
    dtype=st.sampled_from(DTYPES),
)
def test_drawn_shapes(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_size: int,
    page_size: int,
    window: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    new = tuple(q_len for q_len, _ in lengths)
    check(
        Case(
            new,
            tuple(q_len + before for q_len, before in lengths),
            heads[0] * heads[1],
            heads[0],
            head_size,
            page_size,
            dtype,
            window=window,
            row_factors=True,
        )
    )


@pytest.mark.parametrize("q_len", [1, 20])
@pytest.mark.parametrize("head_size", [8, 24, 256])
def test_every_number_is_widened_exactly(isa: str, head_size: int, q_len: int) -> None:
    """There is one key per sequence, so its weight is 1 and ``out`` is the value."""
    codes = torch.arange(-128, 128, dtype=torch.int8)
    rows = codes.repeat(head_size)[: 256 * head_size].view(256, 1, head_size)
    problem = Case((q_len,) * 256, (1,) * 256, 1, 1, head_size, page_size=0, causal=False).build()
    factors = torch.linspace(0.01, 9, 256)[:, None]
    out, _ = cpu.run(
        replace(
            problem,
            key=torch.zeros_like(rows),
            value=rows,
            key_factors=torch.ones(256, 1),
            value_factors=factors,
            kv_start_loc=torch.arange(256, dtype=torch.int32),
        )
    )
    expected = (rows.float() * factors[..., None]).repeat_interleave(q_len, 0)
    torch.testing.assert_close(out, expected, rtol=2**-23, atol=0)


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_a_row_of_nan_reaches_only_the_queries_that_see_it(isa: str, rows: int) -> None:
    """A row that held infinity or NaN has the factor NaN, as unused pages may have."""
    problem = Case((rows,), (300,), 2, 2, page_size=0, row_factors=True).build()
    position = 300 - rows // 2 - 1
    assert problem.kv_start_loc is not None
    assert problem.key_factors is not None
    problem.key_factors[int(problem.kv_start_loc[0]) + position, 0] = math.nan
    out, _ = cpu.run(problem)
    sees = torch.arange(rows) + 300 - rows >= position
    assert out[sees, 0].isnan().all()
    assert out[~sees].isfinite().all()
    assert out[:, 1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "head_size"), [(1, 128), (13, 72), (700, 64)])
def test_rows_land_in_their_slots_with_their_factors(
    isa: str, dtype: torch.dtype, num_tokens: int, head_size: int
) -> None:
    random = torch.Generator().manual_seed(num_tokens)
    page, blocks = 16, -(-num_tokens // 16) + 1
    qkv = (torch.randn(num_tokens + 2, 6, head_size, generator=random) * 5).to(dtype)
    qkv[num_tokens // 2, 2] = 0
    key, value = qkv[:, 2:4], qkv[:, 4:6]
    slots = torch.randperm(blocks * page, generator=random)[:num_tokens]
    slots[1::5] = -1
    stored = int8_cache(blocks, page, 2, head_size)
    expected = [part.clone() for part in stored]
    for token, slot in enumerate(slots.tolist()):
        for part, rows in enumerate((key, value)):
            if slot >= 0:
                found, factors = rounded_rows(rows[token])
                expected[part][slot // page, slot % page] = found
                expected[part + 2][slot // page, slot % page] = factors
    cpu.write_kv(key, value, *stored[:2], slots, factors=(stored[2], stored[3]))
    for part, wanted in zip(stored, expected, strict=True):
        assert torch.equal(part, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_every_size_are_rounded_as_torch_does(isa: str, dtype: torch.dtype) -> None:
    numbers = _interesting(dtype)
    rows = numbers[numbers.isfinite()]
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    rows = torch.cat([rows, numbers[numbers.isfinite()]])  # neighbours of all sizes, and of one size
    rows = rows[: len(rows) // 64 * 64].view(-1, 1, 64)
    key, value, key_factors, value_factors = int8_cache(1, len(rows), 1, 64)
    cpu.write_kv(rows, rows, key, value, torch.arange(len(rows)), factors=(key_factors, value_factors))
    found, factors = rounded_rows(rows)
    for written, of_rows in ((key, key_factors), (value, value_factors)):
        assert torch.equal(of_rows[0], factors)
        assert torch.equal(written[0], found)


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 8, 71])
def test_a_row_with_infinity_or_nan_becomes_nan(isa: str, broken: float, place: int) -> None:
    rows = torch.ones(1, 2, 72)
    rows[0, 1, place] = broken
    key, value, key_factors, value_factors = int8_cache(1, 16, 2, 72)
    cpu.write_kv(rows, rows, key, value, torch.zeros(1, dtype=torch.int64), factors=(key_factors, value_factors))
    assert key_factors[0, 0].isnan().tolist() == value_factors[0, 0].isnan().tolist() == [False, True]
    assert (key[0, 0, 1] == 0).all()
    assert (key[0, 0, 0] == 127).all()


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("head_size", [8, 72])
def test_saturated_numbers_are_counted(isa: str, kv_dtype: torch.dtype, head_size: int) -> None:
    largest = torch.finfo(kv_dtype).max
    key = torch.zeros(500, 2, head_size)
    key[3, 1, :4] = torch.tensor([largest * 2, largest * 2 + largest / 64, -3 * largest, math.nan])
    value = torch.full_like(key, 0.5)
    value[400, 0, head_size - 1] = math.inf
    cache = torch.zeros(500, 1, 2, head_size).to(kv_dtype)
    count = torch.full((1,), 5)
    cpu.write_kv(key, value, cache, cache.clone(), torch.arange(500), key_scale=2.0, saturated=count)
    assert count.item() == 5 + 3


NAMES = ["key_factors", "value_factors"]


@pytest.mark.parametrize("name", NAMES)
def test_factors_that_do_not_match_are_refused(name: str) -> None:
    problem = Case((3,), (20,), row_factors=True).build()
    factors = getattr(problem, name)
    with pytest.raises(ValueError, match=f"{name} are missing: int8 caches have a factor for each row"):
        cpu.run(replace(problem, **{name: None}))
    with pytest.raises(ValueError, match=rf"{name} must be \[4, 16, 2\] float32 on cpu, not \[4, 16, 1\]"):
        cpu.run(replace(problem, **{name: factors[..., :1]}))
    with pytest.raises(ValueError, match=f"{name} must be .* float32 on cpu, not .* torch.float64"):
        cpu.run(replace(problem, **{name: factors.double()}))
    plain = Case((3,), (20,)).build()
    with pytest.raises(ValueError, match=f"{name} must be None: int8 caches have .* others .torch.float32. none"):
        cpu.run(replace(plain, **{name: factors}))
    with pytest.raises(ValueError, match="key_scale must be 1 unless K and V are fp8, not 2"):
        cpu.run(replace(problem, key_scale=2.0))


def test_writes_without_factors_are_refused() -> None:
    key, value, *factors = int8_cache(1, 16, 2, 64)
    rows, slots = torch.ones(1, 2, 64), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="key_factors are missing: int8 caches have a factor for each row"):
        cpu.write_kv(rows, rows, key, value, slots)
    with pytest.raises(ValueError, match=r"saturated must be one int64 on cpu, not \[2\] torch.int64"):
        cpu.write_kv(rows, rows, key, value, slots, factors=(factors[0], factors[1]), saturated=torch.zeros(2).long())
