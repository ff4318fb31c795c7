"""The KV caches of all layers: one piece of huge-page memory that every contender reads in its own layout.

Used by: runner.py.
"""

from __future__ import annotations

import torch

from fastattention_vllm.bench import machine
from fastattention_vllm.bench.cases import DTYPES, Case
from fastattention_vllm.bench.sampling import Rotation
from fastattention_vllm.placement import host_memory

COLD_BYTES = 4 << 30
"""A sweep that rotates over this much finds nothing of the last one in a cache, however large."""
COLD_CACHES = 8
"""And over this many times the last-level cache, where that is more."""
USABLE = 0.6
"""Part of the available memory that may be taken."""
_TILE_ELEMENTS = 4194301  # a prime, so that no row of K meets the same row again in the next page


def plan_rotation(case: Case, available: int, cache: int, asked: int | None = None) -> Rotation:
    """Copies of the cache for ``case``, from bytes of ``available`` memory and of last-level ``cache``.

    ``asked``: bytes to rotate over instead of what these say.

    Raises ``MemoryError`` with one sentence if not even one copy fits.
    """
    usable = int(available * USABLE)
    if case.layer_bytes > usable:
        raise MemoryError(
            f"One layer's KV cache takes {case.layer_bytes / 2**30:.1f} GiB, "
            f"but only {usable / 2**30:.1f} GiB may be used here."
        )
    if case.kind == "prefill":
        return Rotation(1)
    wanted = max(COLD_BYTES, COLD_CACHES * cache)
    layers = -(-(wanted if asked is None else asked) // case.layer_bytes)
    possible = usable // case.layer_bytes
    layers, why = (layers, "as asked") if layers <= possible else (possible, "because memory is short")
    if layers * case.layer_bytes >= wanted:
        return Rotation(layers)
    return Rotation(
        layers,
        f"Rotated over {layers * case.layer_bytes / 2**30:.3g} GiB instead of {wanted / 2**30:.3g} GiB, {why}: "
        "a large cache may flatter it.",
    )


class Arena:
    """Huge-page memory, kept between cases and filled with normally distributed numbers of one dtype."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._filled: tuple[str, int] = ("", 0)

    def layers(self, case: Case, count: int) -> list[torch.Tensor]:
        """``count`` uint8 tensors of ``case.layer_bytes``, full of numbers of ``case.kv_dtype``."""
        stride = -(-case.layer_bytes // 4096) * 4096
        total = stride * count
        if self._bytes.numel() < total:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # first the old memory goes
            self._bytes, _ = host_memory.commit(total)
            self._filled = ("", 0)
        if self._filled[0] != case.kv_dtype or self._filled[1] < total:
            fill(self._bytes[:total], DTYPES[case.kv_dtype])
            self._filled = (case.kv_dtype, total)
        return [self._bytes[i * stride : i * stride + case.layer_bytes] for i in range(count)]

    def available(self) -> int:
        """Bytes that could be used: what is free, and what this arena holds already."""
        return machine.available_memory() + self._bytes.numel()


def random_tile(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_TILE_ELEMENTS, generator=generator).to(dtype)


def fill(memory: torch.Tensor, dtype: torch.dtype) -> None:
    """Copies of one random tile: filling 4 GiB with fresh numbers would take a minute."""
    tile = random_tile(dtype).view(torch.uint8)
    whole = memory.numel() // tile.numel() * tile.numel()
    memory[:whole].view(-1, tile.numel()).copy_(tile)
    memory[whole:] = tile[: memory.numel() - whole]
