"""How the pages of host layers store keys and values: in the model's dtype, or rounded to 8 bits.

An fp8 row is divided by one scale for the whole layer. An int8 row has its own factor, fp32, for each token and KV
head. The factors of a head's keys, and then of its values, follow the rows of its part of the page:

    [block][KV head]: block_size rows of K | V, block_size factors of K, block_size factors of V

So rows stay as aligned as in other dtypes, and each cache line of factors serves 16 tokens.

Here is also what a device does with 8-bit rows, in torch's operations, because its attention kernels take the model's
dtype only: it rounds new rows before they are written to the host, so that the link carries half, and widens pages
after they were copied to it. The CPU kernels do both by themselves (``attention/cpu``), with the same results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastattention_vllm.placement.kv_size import FACTOR_BYTES, HOST_DTYPES

LARGEST_INT8 = 127
TORCH_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
"""The dtypes of :data:`HOST_DTYPES`."""
assert tuple(TORCH_DTYPES) == HOST_DTYPES


def has_factors(dtype: torch.dtype) -> bool:
    return dtype == torch.int8


def token_bytes(head_size: int, dtype: torch.dtype) -> int:
    """Bytes of one token's K and V of one KV head, with their factors."""
    return 2 * (head_size * dtype.itemsize + (FACTOR_BYTES if has_factors(dtype) else 0))


def page_shape(num_blocks: int, num_kv_heads: int, block_size: int, head_size: int, dtype: torch.dtype) -> list[int]:
    """The shape of a cache whose pages :func:`pages_of` takes apart."""
    return [num_blocks, num_kv_heads, block_size, token_bytes(head_size, dtype) // dtype.itemsize]


@dataclass(frozen=True)
class Pages:
    """The parts of a cache, as views."""

    key: torch.Tensor
    """``[num_blocks, block_size, num_kv_heads, head_size]``."""
    value: torch.Tensor
    factors: tuple[torch.Tensor, torch.Tensor] | None
    """Of keys and of values, ``[num_blocks, block_size, num_kv_heads]`` fp32, if the cache is int8."""

    def first(self, count: int) -> Pages:
        """The first ``count`` blocks."""
        factors = None if self.factors is None else (self.factors[0][:count], self.factors[1][:count])
        return Pages(self.key[:count], self.value[:count], factors)

    def widened(self, dtype: torch.dtype, scales: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in ``dtype``."""
        key_factors, value_factors = self.factors or (None, None)
        return _widened(self.key, key_factors, scales[0], dtype), _widened(self.value, value_factors, scales[1], dtype)

    def write(self, rows: Rows, slots: torch.Tensor) -> None:
        """Store ``rows`` at ``slots``, which are int64 on the device of both and not negative."""
        block_size = self.key.shape[1]
        blocks, tokens = slots // block_size, slots % block_size
        for page, of_rows in ((self.key, rows.key), (self.value, rows.value)):
            # torch cannot index fp8, but bytes.
            page.view(torch.uint8)[blocks, tokens] = of_rows.view(torch.uint8)
        if self.factors is not None and rows.factors is not None:
            for stored, of_rows in zip(self.factors, rows.factors, strict=True):
                stored[blocks, tokens] = of_rows


@dataclass(frozen=True)
class Rows:
    """New rows as they are stored."""

    key: torch.Tensor
    """``[num_tokens, num_kv_heads, head_size]``."""
    value: torch.Tensor
    factors: tuple[torch.Tensor, torch.Tensor] | None
    """``[num_tokens, num_kv_heads]`` fp32."""
    saturated: torch.Tensor | None
    """How many numbers were beyond the largest fp8 number: one int64, where the rows are. None if not fp8."""

    def widened(self, dtype: torch.dtype, scales: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows as they will be read from the cache."""
        return Pages(self.key, self.value, self.factors).widened(dtype, scales)

    def __getitem__(self, tokens: torch.Tensor) -> Rows:
        factors = None if self.factors is None else (self.factors[0][tokens], self.factors[1][tokens])
        key, value = (part.view(torch.uint8)[tokens].view(part.dtype) for part in (self.key, self.value))
        return Rows(key, value, factors, self.saturated)


def pages_of(cache: torch.Tensor) -> Pages:
    """The parts of ``cache``, which is contiguous and has the shape of :func:`page_shape`."""
    _, _, block_size, row = cache.shape
    if not has_factors(cache.dtype):
        key, value = cache.transpose(1, 2).chunk(2, dim=-1)
        return Pages(key, value, None)
    size = row // 2 - FACTOR_BYTES
    per_head = cache.flatten(2)
    rows, factors = per_head.split([block_size * 2 * size, block_size * 2 * FACTOR_BYTES], dim=-1)
    key, value = rows.unflatten(2, (block_size, 2 * size)).transpose(1, 2).chunk(2, dim=-1)
    of_keys, of_values = factors.view(torch.float32).unflatten(2, (2, block_size)).permute(2, 0, 3, 1)
    return Pages(key, value, (of_keys, of_values))


def rounded(key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype, scales: tuple[float, float]) -> Rows:
    """``key`` and ``value`` (:class:`Rows`) as a cache of an 8-bit ``dtype`` stores them."""
    if has_factors(dtype):
        (key, key_factors), (value, value_factors) = _int8(key), _int8(value)
        return Rows(key, value, (key_factors, value_factors), None)
    largest = torch.finfo(dtype).max
    parts, saturated = [], torch.zeros(1, dtype=torch.int64, device=key.device)
    for part, scale in ((key, scales[0]), (value, scales[1])):
        divided = part.float() / scale
        saturated += (divided.abs() > largest).sum()
        # torch's own conversion of e5m2 overflows to infinity; NaN stays NaN in both.
        parts.append(divided.clamp_(-largest, largest).to(dtype))
    return Rows(parts[0], parts[1], None, saturated)


def _int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = rows.float()
    factors = wide.abs().amax(-1) / LARGEST_INT8
    finite = factors.isfinite()
    divisor = factors.masked_fill((factors == 0) | ~finite, 1.0)
    stored = (wide / divisor[..., None]).round_().masked_fill_(~finite[..., None], 0.0).to(torch.int8)
    return stored, factors.masked_fill(~finite, torch.nan)


def _widened(stored: torch.Tensor, factors: torch.Tensor | None, scale: float, dtype: torch.dtype) -> torch.Tensor:
    if factors is None:
        wide = stored.to(dtype)
        return wide if scale == 1.0 else wide.mul_(scale)
    return torch.mul(stored, factors[..., None], out=torch.empty(stored.shape, dtype=dtype, device=stored.device))
