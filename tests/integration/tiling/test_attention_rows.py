"""Blocks of a step: within its block, every token attends to the same keys as in the whole step."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.integration.tiling.attention_rows import row_blocks


@dataclasses.dataclass
class Metadata:
    """The fields of vLLM's metadata that are split."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    scheduler_metadata: object = None
    max_num_splits: int = 3


def attended(metadata: Metadata) -> list[tuple[int, int]]:
    """For each token, its request (by its row of the block table) and the number of tokens it attends to."""
    starts = metadata.query_start_loc.tolist()
    assert starts[0] == 0
    assert starts[-1] == metadata.num_actual_tokens
    found, longest = [], 0
    rows = zip(itertools.pairwise(starts), metadata.seq_lens.tolist(), metadata.block_table.tolist(), strict=True)
    for (begin, end), length, (request,) in rows:
        longest = max(longest, end - begin)
        found += [(request, length - (end - 1 - token)) for token in range(begin, end)]
    assert metadata.max_query_len == longest
    return found


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 60)), min_size=1, max_size=8),
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
)
def test_tokens_attend_as_in_the_whole_step(requests: list[tuple[int, int]], sizes: list[int]) -> None:
    """``requests`` lists new and earlier tokens. The last block takes the remaining tokens and padding."""
    starts = list(itertools.accumulate((new for new, _ in requests), initial=0))
    sizes = [*sizes, starts[-1]]
    whole = Metadata(
        starts[-1],
        max(new for new, _ in requests),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([new + before for new, before in requests], dtype=torch.int32),
        torch.arange(len(requests)).unsqueeze(1),
    )
    lengths = whole.seq_lens.clone()
    blocks = row_blocks(sizes, starts, whole.query_start_loc, whole.seq_lens)
    assert torch.equal(whole.seq_lens, lengths), "the step's own lengths must not change"
    assert [block.begin for block in blocks[1:]] == [block.end for block in blocks[:-1]]
    assert (blocks[0].begin, blocks[-1].end) == (0, starts[-1])
    parts = [block.of(whole) for block in blocks]
    assert all(part.query_start_loc.dtype == part.seq_lens.dtype == torch.int32 for part in parts)
    assert [token for part in parts for token in attended(part)] == attended(whole)
