"""Splits a step into blocks of rows. For an attention kernel, each block is a separate step."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastattention_vllm.integration.refusal import Refusal

CUT = (
    "num_actual_tokens",
    "max_query_len",
    "query_start_loc",
    "seq_lens",
    "block_table",
    "scheduler_metadata",
    "max_num_splits",
)
"""Fields of vLLM's FlashAttentionMetadata that differ for each block."""
ALIKE = ("max_seq_len", "slot_mapping", "causal")
"""Fields that a block shares with its step: an upper bound, slots (which attention does not read), and the mask."""


def one_causality(causal: Any) -> bool:
    """Whether a step is causal.

    Raises:
        Refusal: vLLM specifies causality per request.
    """
    if isinstance(causal, torch.Tensor):
        raise Refusal(
            "this model uses a causal mask in some requests and none in others, which fastattention does not support; "
            "serve another model."
        )
    return bool(causal)


def can_be_cut(metadata: Any) -> bool:
    """Whether a step can be computed in blocks of rows: it is causal, and sets only the fields listed above.

    The other fields of vLLM's versions also describe requests or tokens (cascades, image prefixes, reference windows,
    decode context parallelism), so a step that sets one of them is not split.
    """
    if not isinstance(metadata.causal, bool) or not metadata.causal:
        return False
    others = {field.name for field in dataclasses.fields(metadata)}.difference(CUT, ALIKE)
    return not any(_is_set(getattr(metadata, name)) for name in others)


def _is_set(value: Any) -> bool:
    return value is not None and (not isinstance(value, int) or value != 0)


@dataclass(frozen=True)
class RowBlock:
    """Tokens ``begin`` to ``end`` of a step, as a separate step. It may begin and end within requests."""

    begin: int
    end: int
    first: int
    last: int
    """The block contains tokens of the requests from ``first`` up to, but not including, ``last``."""
    starts: torch.Tensor
    """[requests + 1], the first token of each request in the block, and the end."""
    lengths: torch.Tensor
    """[requests], the number of tokens that the request's last token in the block attends to."""
    longest: int

    def of(self, metadata: Any) -> Any:
        """The block's version of the step's FlashAttentionMetadata, which must satisfy :func:`can_be_cut`."""
        own = (
            self.end - self.begin,
            self.longest,
            self.starts,
            self.lengths,
            metadata.block_table[self.first : self.last],
            None,
            0,
        )
        return dataclasses.replace(metadata, **dict(zip(CUT, own, strict=True)))


def row_blocks(
    sizes: Sequence[int], starts_cpu: Sequence[int], starts: torch.Tensor, lengths: torch.Tensor
) -> list[RowBlock]:
    """Split a step into blocks of rows.

    Args:
        sizes: rows of each block; together all of the step's tokens, or more if the step is padded.
        starts_cpu, starts: [requests + 1], the first token of each request, on the host and on the device.
        lengths: [requests], the number of tokens that each request's last query attends to, on the device.
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
