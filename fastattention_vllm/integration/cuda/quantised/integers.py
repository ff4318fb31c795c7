"""Integers of 4 and 8 bits in int32 words: the orders of AWQ, GPTQ and compressed-tensors, and the kernels' order.

The kernels want words of consecutive k of a column, the first in the lowest bits. Everything here needs at most as much
memory as the matrix itself.
"""

from __future__ import annotations

import torch

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of AWQ of each of eight columns, in units of 4 bits."""
CHUNK = 1 << 24
"""Numbers that are unpacked at a time."""


def awq_numbers(qweight: torch.Tensor) -> torch.Tensor:
    """int32 ``[k / 8, n]`` from AWQ's ``[k, n / 8]``, whose words have eight columns."""
    words = qweight.unflatten(0, (-1, 8))
    found = torch.empty((words.shape[0], words.shape[2], 8), dtype=torch.int32, device=qweight.device)
    for column, place in enumerate(AWQ_PLACES):
        found[..., column] = 0
        for row in range(8):
            found[..., column] |= (words[:, row] >> 4 * place & 15) << 4 * row
    return found.flatten(1)


def awq_zeros(qzeros: torch.Tensor) -> torch.Tensor:
    """uint8 ``[groups, n]`` from AWQ's ``[groups, n / 8]``."""
    return torch.stack([(qzeros >> 4 * place & 15).to(torch.uint8) for place in AWQ_PLACES], dim=-1).flatten(1)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 ``[rows, columns * 32 / bits]`` from int32 ``[rows, columns]``, the first number in the lowest bits."""
    mask = (1 << bits) - 1
    return torch.stack([(words >> shift & mask).to(torch.uint8) for shift in range(0, 32, bits)], dim=-1).flatten(1)


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of :func:`unpacked`."""
    parts = numbers.unflatten(1, (-1, 32 // bits))
    found = torch.zeros(parts.shape[:2], dtype=torch.int32, device=numbers.device)
    for place in range(32 // bits):
        found |= parts[..., place].to(torch.int32) << bits * place
    return found


def reordered(numbers: torch.Tensor, order: torch.Tensor, bits: int) -> torch.Tensor:
    """``numbers``, int32 ``[k * bits / 32, n]`` in the kernels' order, with k in another ``order`` (``[k]``)."""
    columns = max(1, CHUNK // len(order))
    found = [packed(unpacked(part.t(), bits)[:, order], bits).t() for part in numbers.split(columns, dim=1)]
    return torch.cat(found, dim=1)
