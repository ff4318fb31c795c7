"""Pages of 8 bits: their parts, their bytes, and what a device does with them in torch's operations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.placement import stored_rows
from fastattention_vllm.placement.kv_size import host_token_bytes
from fastattention_vllm.placement.stored_rows import TORCH_DTYPES, Pages, page_shape, pages_of, token_bytes

INT8, E4M3, E5M2 = TORCH_DTYPES["int8"], TORCH_DTYPES["fp8_e4m3"], TORCH_DTYPES["fp8_e5m2"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def parts_of(pages: Pages) -> list[torch.Tensor]:
    return [pages.key, pages.value, *(pages.factors or ())]


@given(
    blocks=st.integers(1, 4),
    heads=st.integers(1, 3),
    block_size=st.integers(1, 20),
    head_size=st.sampled_from([8, 24, 64, 128]),
    name=st.sampled_from([*TORCH_DTYPES, "bf16"]),
)
def test_every_byte_of_a_page_belongs_to_one_number(
    blocks: int, heads: int, block_size: int, head_size: int, name: str
) -> None:
    dtype = TORCH_DTYPES.get(name, torch.bfloat16)
    memory = torch.zeros(blocks * heads * block_size * token_bytes(head_size, dtype), dtype=torch.uint8)
    cache = memory.view(dtype).view(page_shape(blocks, heads, block_size, head_size, dtype))
    pages = pages_of(cache)
    assert pages.key.shape == pages.value.shape == (blocks, block_size, heads, head_size)
    if name != "bf16":
        assert token_bytes(head_size, dtype) == host_token_bytes(head_size, name)
    owners = torch.zeros_like(memory)
    for number, part in enumerate(parts_of(pages)):
        before = memory.clone()
        for at in torch.cartesian_prod(*(torch.arange(size) for size in part.shape[:3]))[:: 1 + number].view(-1, 3):
            block, token, head = at.tolist()
            part[block, token, head] = 1
        changed = memory != before
        if number < 2 or dtype == INT8:
            assert int(changed.sum()) > 0
        owners += changed
        memory.copy_(before)
    assert int(owners.max()) == 1, "two parts of a page must not share memory"
    for part in parts_of(pages):
        part.view(torch.uint8).fill_(1) if part.dtype.itemsize == 1 else part.fill_(1)
    if dtype == INT8:
        assert sum(part.nbytes for part in parts_of(pages)) == memory.nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_rows_are_rounded_as_the_cpu_kernels_do(name: str, dtype: torch.dtype) -> None:
    """Prompts come from the device and answers from the CPU into the same pages."""
    stored, random = TORCH_DTYPES[name], torch.Generator().manual_seed(3)
    scales = (1.0, 1.0) if stored == INT8 else (0.3, 7.0)
    rows = torch.randn(300, 2, 72, generator=random) * torch.logspace(-6, 4, 300)[:, None, None]
    rows[7] = 0
    rows[11, 1, 5], rows[12, 0, 71] = math.nan, math.inf
    key, value = rows.to(dtype), -rows.flip(0).to(dtype)
    caches = [torch.zeros(page_shape(20, 2, 16, 72, stored), dtype=stored) for _ in range(2)]
    slots = torch.randperm(320, generator=random)[:300]
    ours, theirs = map(pages_of, caches)
    rounded = stored_rows.rounded(key, value, stored, scales)
    ours.write(rounded, slots)
    saturated = torch.zeros(1, dtype=torch.int64)
    count = None if stored == INT8 else saturated
    cpu.write_kv(key, value, theirs.key, theirs.value, slots, *scales, factors=theirs.factors, saturated=count)
    for part, expected in zip(parts_of(ours), parts_of(theirs), strict=True):
        torch.testing.assert_close(part.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
    if rounded.saturated is not None:
        assert rounded.saturated.item() == saturated.item() > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_widened_pages_are_the_numbers_that_were_stored(name: str, dtype: torch.dtype) -> None:
    stored = TORCH_DTYPES[name]
    scales = (1.0, 1.0) if stored == INT8 else (0.5, 3.0)
    random = torch.Generator().manual_seed(5)
    key, value = torch.randn(2, 40, 2, 32, generator=random).to(dtype)
    key[..., 7] *= 20
    pages = pages_of(torch.zeros(page_shape(3, 2, 16, 32, stored), dtype=stored))
    rows = stored_rows.rounded(key, value, stored, scales)
    pages.write(rows, torch.arange(40))
    for found, new, exact, part in zip(
        pages.first(3).widened(dtype, scales), rows.widened(dtype, scales), (key, value), (0, 1), strict=True
    ):
        assert found.dtype == new.dtype == dtype
        assert torch.equal(found.flatten(0, 1)[:40], new)
        of_row = exact.float().abs().amax(-1, keepdim=True)
        step = of_row / 254 if stored == INT8 else exact.float().abs() / (16 if stored == E4M3 else 8)
        # Half a step, the smallest fp8 numbers, and the rounding to the dtype.
        allowed = step + scales[part] * 2.0**-10 * (stored == E4M3) + 2**-8 * of_row * (dtype != torch.float32)
        assert bool(((new.float() - exact.float()).abs() <= allowed * 1.0001).all())


def test_tokens_can_be_chosen() -> None:
    rows: Any = stored_rows.rounded(*torch.randn(2, 5, 2, 16), INT8, (1.0, 1.0))
    chosen = rows[torch.tensor([4, 1])]
    assert torch.equal(chosen.key, rows.key[[4, 1]])
    assert torch.equal(chosen.factors[1], rows.factors[1][[4, 1]])
