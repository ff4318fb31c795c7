"""The tiling-mask: one small matrix from which every masked page reads its tile, shifted.

A tile of a mask depends only on the distance between its first query and its first key. So one matrix holds the tiles
of all distances, and a program reads one by choosing the first column. The paper's matrix has 2M x 2M numbers; the rows
that no tile starts from are left out here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

PAGE = 128
UNLIMITED = 1 << 30
"""A window that is longer than any sequence. Twice this number still fits in an int32."""
HIDDEN = -1.0e38
"""Added to a hidden score: below the programs' first maximum, -1e30, so that a hidden key has a weight of 0. bf16 holds
it; fp16 would not.
"""


@dataclass(frozen=True)
class Mask:
    matrix: torch.Tensor
    """``[rows, columns]`` bf16 of 0 and ``HIDDEN``."""
    zero: int
    """Column of the tile whose first key is at the position of the first query."""
    cap: int
    """Larger distances are cut to this one, whose tile hides nothing."""
    left_zero: int
    """As ``zero``, for the tile whose first key is the first one that the first query's window shows."""


@functools.lru_cache(maxsize=64)
def tiling_mask(rows: int, repeat: int, window: int, device: torch.device) -> Mask:
    """The mask of tiles of ``rows`` rows, where row ``r`` is token ``r // repeat``, at its own position.

    Args:
        window: keys before itself that a token sees, or ``UNLIMITED``. Pages that both edges of the window may cross
            need a matrix of their own; otherwise the left edge's columns follow those of the diagonal.
    """
    token = torch.arange(rows)[:, None] // repeat
    if window < rows + PAGE:
        key = torch.arange(window + 2 * PAGE + rows)[None] - (window + PAGE)
        hidden, zero, cap, left_zero = (key > token) | (key < token - window), window + PAGE, UNLIMITED, PAGE
    else:
        key = torch.arange(2 * PAGE + rows)[None] - PAGE
        edges = [key > token] if window >= UNLIMITED else [key > token, key < token]
        hidden, zero, cap, left_zero = torch.cat(edges, 1), PAGE, PAGE, 3 * PAGE + rows
    matrix = torch.zeros(hidden.shape, dtype=torch.bfloat16).masked_fill_(hidden, HIDDEN)
    return Mask(matrix.to(device), zero, cap, left_zero)
