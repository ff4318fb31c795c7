"""A step of requests cut into blocks of rows, each of which is a step of its own to an attention kernel."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RowBlock:
    """Tokens ``begin`` to ``end`` of a step, as a step of their own: the ends of some requests' prompts, or parts."""

    begin: int
    end: int
    first: int
    last: int
    """Requests with tokens in it, from the first to before the last."""
    starts: torch.Tensor
    """[requests + 1], of their tokens in the block."""
    lengths: torch.Tensor
    """[requests], of what the last of these tokens attends to."""
    longest: int

    def of(self, metadata: Any) -> Any:
        """vLLM's metadata of the whole step (FlashAttentionMetadata) for the block alone."""
        return dataclasses.replace(
            metadata,
            num_actual_tokens=self.end - self.begin,
            max_query_len=self.longest,
            query_start_loc=self.starts,
            seq_lens=self.lengths,
            block_table=metadata.block_table[self.first : self.last],
            scheduler_metadata=None,
            max_num_splits=0,
        )


def row_blocks(
    sizes: Sequence[int], starts_cpu: Sequence[int], starts: torch.Tensor, lengths: torch.Tensor
) -> list[RowBlock]:
    """Cut a step of requests into blocks of rows.

    Args:
        sizes: rows of each block, all of the step's tokens together or more (a padded step).
        starts_cpu, starts: [requests + 1] where each request's tokens begin, on the host and on the device.
        lengths: [requests] tokens that each one's last query attends to, on the device.
    """
    tokens, found, begin = starts_cpu[-1], [], 0
    for size in sizes:
        end = min(begin + size, tokens)
        if end == begin:
            break
        first = bisect.bisect_right(starts_cpu, begin) - 1
        last = bisect.bisect_left(starts_cpu, end)
        cut = lengths[first:last].clone()
        cut[-1] -= starts_cpu[last] - end
        longest = max(min(starts_cpu[i + 1], end) - max(starts_cpu[i], begin) for i in range(first, last))
        own = (starts[first : last + 1].clamp(begin, end) - begin).to(starts.dtype)
        found.append(RowBlock(begin, end, first, last, own, cut, longest))
        begin = end
    return found
