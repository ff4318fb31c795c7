from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.placement.link import FEW_RUNS, LocalLink, runs_of


@given(st.lists(st.integers(0, 30), min_size=1, max_size=80), st.integers(1, 5))
def test_runs_consist_of_ascending_neighbours(starts: list[int], length: int) -> None:
    """Joined, the runs are the blocks again, and no run could be longer. At the limit, the last run holds the rest."""
    blocks = [start + i for start in starts for i in range(length)]
    runs = runs_of(torch.tensor(blocks), FEW_RUNS + 1)
    naive = [0, *(i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1)]
    assert [begin for begin, _, _ in runs] == naive[: FEW_RUNS + 1]
    assert [first for _, first, _ in runs] == [blocks[begin] for begin in naive[: FEW_RUNS + 1]]
    assert sum(count for _, _, count in runs) == len(blocks)
    if len(naive) <= FEW_RUNS:
        assert [first + i for _, first, count in runs for i in range(count)] == blocks
    else:
        assert len(runs) > FEW_RUNS, "the result must show that there are too many"


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(blocks=st.lists(st.integers(0, 8), max_size=5))
def test_fetching_copies_those_blocks_to_the_front_and_leaves_the_rest(dtype: torch.dtype, blocks: list[int]) -> None:
    random = torch.Generator().manual_seed(0)
    cache = torch.randn(9, 2, 4, 6, generator=random).to(dtype)
    link = LocalLink()
    memory = link.staging(5 * cache[:1].nbytes)
    assert memory.dtype == torch.uint8
    target = memory.view(dtype).view(5, 2, 4, 6)
    target.view(torch.uint8).fill_(7)
    link.fetch(cache, torch.tensor(blocks, dtype=torch.int64), target, [])
    for row, block in enumerate(blocks):
        assert torch.equal(target[row].view(torch.uint8), cache[block].view(torch.uint8))
    assert (target[len(blocks) :].view(torch.uint8) == 7).all()
