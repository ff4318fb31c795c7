from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fastattention_vllm.attention.cpu import kernels as cpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def to_cache(rows: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """The value that a cache of that dtype stores for ``rows``: torch's rounding, limited to fp8's largest number."""
    if dtype not in FP8:
        return rows.to(dtype)
    largest = torch.finfo(dtype).max
    return (rows.float() / scale).clamp(-largest, largest).to(dtype)


def caches(layout: str, blocks: int, page: int, heads: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    if layout == "HND":
        cache = torch.zeros(blocks, heads, page, 2 * size, dtype=dtype)
        return list(cache.transpose(1, 2).split(size, dim=-1))
    return list(torch.zeros(blocks, 2, page, heads, size, dtype=dtype).unbind(1))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page_size", [16, 32, 784])
@pytest.mark.parametrize("kv_dtype", DTYPES + FP8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "head_size"), [(1, 128), (13, 72), (700, 64)])
def test_rows_land_in_their_slots_and_nothing_else_changes(
    isa: str,
    layout: str,
    page_size: int,
    kv_dtype: torch.dtype,
    dtype: torch.dtype,
    num_tokens: int,
    head_size: int,
) -> None:
    random = torch.Generator().manual_seed(num_tokens + page_size)
    blocks = -(-num_tokens // page_size) + 1
    # Keys and values as vLLM passes them: slices of one projection, with more rows than slots.
    qkv = torch.randn(num_tokens + 2, 6, head_size, generator=random).to(dtype)
    key, value = qkv[:, 2:4], qkv[:, 4:6]
    slots = torch.randperm(blocks * page_size, generator=random)[:num_tokens]
    slots[::5] = -1
    key_cache, value_cache = caches(layout, blocks, page_size, 2, head_size, kv_dtype)
    expected_key, expected_value = key_cache.clone(), value_cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected_key[slot // page_size, slot % page_size] = to_cache(key[token], kv_dtype)
            expected_value[slot // page_size, slot % page_size] = to_cache(value[token], kv_dtype)
    cpu.write_kv(key, value, key_cache, value_cache, slots)
    assert torch.equal(key_cache.float(), expected_key.float())
    assert torch.equal(value_cache.float(), expected_value.float())


def _interesting(dtype: torch.dtype) -> torch.Tensor:
    """All 65536 values of a 16-bit dtype. For fp32, as many spread over all exponents, with every rounding case."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    if dtype != torch.float32:
        return bits.to(torch.int16).view(dtype)
    tails = torch.tensor(
        [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32
    )
    return ((bits << 16)[:, None] | tails).view(torch.float32).flatten()


@pytest.mark.parametrize("kv_dtype", DTYPES + FP8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_casts_round_as_torch_does_for_every_value(isa: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    rows = _interesting(dtype).view(-1, 1, 64)
    key_cache, value_cache = caches("NHD", 1, len(rows), 1, 64, kv_dtype)
    cpu.write_kv(rows, rows, key_cache, value_cache, torch.arange(len(rows)))
    expected = to_cache(rows, kv_dtype)
    for written in (key_cache[0], value_cache[0]):
        torch.testing.assert_close(written.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(written.float().signbit()[~rows.isnan()], rows.signbit()[~rows.isnan()])
    if kv_dtype == dtype:  # equal bit for bit, including NaN payloads
        width = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(key_cache[0].view(width), rows.view(width))


@pytest.mark.parametrize(
    ("kv_dtype", "largest", "half_way"), [(FP8[0], 448.0, 464.0), (FP8[1], 57344.0, 61440.0)], ids=str
)
@pytest.mark.parametrize("head_size", [8, 64])
def test_values_too_large_for_fp8_become_its_largest_number(
    isa: str, kv_dtype: torch.dtype, largest: float, half_way: float, head_size: int
) -> None:
    """This includes values from half-way to the next number on, which plain rounding turns into NaN or infinity."""
    values = [largest, half_way, half_way + 1, 2 * largest, 3e38, math.inf, math.nan, 1.0]
    rows = torch.tensor(values).repeat(head_size // 8).view(1, 1, head_size)
    key_cache, value_cache = caches("NHD", 1, 1, 1, head_size, kv_dtype)
    cpu.write_kv(rows, -rows, key_cache, value_cache, torch.zeros(1, dtype=torch.int64))
    expected = torch.tensor([*[largest] * 6, math.nan, 1.0]).repeat(head_size // 8)
    torch.testing.assert_close(key_cache.flatten().float(), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(value_cache.flatten().float(), -expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kv_dtype", FP8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_caches_hold_rows_divided_by_their_scale(isa: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    rows = _interesting(dtype).view(-1, 1, 64)
    key_cache, value_cache = caches("NHD", 1, len(rows), 1, 64, kv_dtype)
    cpu.write_kv(rows, rows, key_cache, value_cache, torch.arange(len(rows)), key_scale=0.3, value_scale=7.0)
    for written, scale in ((key_cache[0], 0.3), (value_cache[0], 7.0)):
        expected = to_cache(rows, kv_dtype, scale)
        torch.testing.assert_close(written.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def test_no_tokens() -> None:
    key = torch.zeros(0, 2, 64)
    cache = torch.zeros(1, 16, 2, 64)
    cpu.write_kv(key, key, cache, cache.clone(), torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot_mapping": torch.tensor([0, 32])}, r"slot_mapping\[1\] is 32, but the cache has only 32 slots"),
        ({"slot_mapping": torch.tensor([0, 1], dtype=torch.int32)}, "slot_mapping must be a contiguous int64 vector"),
        ({"slot_mapping": torch.arange(4)}, "slot_mapping has 4 tokens, but key has only 3"),
        ({"value": torch.zeros(3, 2, 32)}, r"value must be \[3, 2, 64\]"),
        (
            {"key": torch.zeros(3, 64), "value": torch.zeros(3, 64)},
            r"key must be \[num_tokens, num_kv_heads, head_size\]",
        ),
        (
            {"key": torch.zeros(3, 2, 64).double(), "value": torch.zeros(3, 2, 64).double()},
            "float32, float16 or bfloat16",
        ),
        (
            {"key": torch.zeros(3, 2, 64).to(FP8[0]), "value": torch.zeros(3, 2, 64).to(FP8[0])},
            "key must be float32, float16 or bfloat16, .* they are torch.float8_e4m3fn and torch.float32",
        ),
        (
            {"key_cache": torch.zeros(2, 16, 2, 64).byte(), "value_cache": torch.zeros(2, 16, 2, 64).byte()},
            "float8_e4m3fn, float8_e5m2 or int8; they are torch.float32 and torch.uint8",
        ),
        ({"key_scale": 2.0}, "key_scale must be 1 unless K and V are fp8, not 2"),
        ({"value_scale": 0.0}, "value_scale must be positive and finite, not 0"),
        ({"value_cache": torch.zeros(2, 16, 2, 64).half()}, r"value_cache must be \[2, 16, 2, 64\] torch.float32"),
        ({"key": torch.zeros(3, 64, 2).transpose(1, 2)}, "key must be contiguous in its last dimension"),
    ],
)
def test_writes_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "key": torch.zeros(3, 2, 64),
        "value": torch.zeros(3, 2, 64),
        "key_cache": torch.zeros(2, 16, 2, 64),
        "value_cache": torch.zeros(2, 16, 2, 64),
        "slot_mapping": torch.arange(2),
    }
    with pytest.raises(ValueError, match=message):
        cpu.write_kv(**(arguments | change))
