"""The tiling-mask: each tile that the programs read equals the mask written out."""

from __future__ import annotations

import pytest
import torch

from fastattention_vllm.attention.ascend_triton.masks import PAGE, UNLIMITED, tiling_mask

CPU = torch.device("cpu")
ROWS = 32


@pytest.mark.parametrize("window", [0, 7, 159, 160, 500, UNLIMITED])
@pytest.mark.parametrize("repeat", [1, 4, ROWS])
def test_every_tile_equals_the_whole_mask(window: int, repeat: int) -> None:
    mask = tiling_mask(ROWS, repeat, window, CPU)
    token = torch.arange(ROWS)[:, None] // repeat
    key = torch.arange(PAGE)[None]
    for first in (0, 5, 127, 128, 700):
        for page in range((first + ROWS - 1) // PAGE + 1):
            distance = first - page * PAGE  # from the page's first key to the first query
            if distance - window >= PAGE:
                continue  # no row sees the page
            own = token + distance
            hidden = (key > own) | (key < own - window)
            left = distance + ROWS - 1 > window  # the window's left edge crosses the page
            column = mask.zero - min(distance, mask.cap)
            if left:
                column = mask.left_zero - max(distance - window, -PAGE)
            assert torch.equal(mask.matrix[:, column : column + PAGE] < 0, hidden), (first, page)


def test_its_size_does_not_depend_on_the_context() -> None:
    assert tiling_mask(128, 1, UNLIMITED, CPU).matrix.nbytes == 96 << 10
    assert tiling_mask(128, 1, 4096, CPU).matrix.nbytes == 192 << 10
