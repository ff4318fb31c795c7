"""A step of requests cut into blocks of rows, each of which is a step of its own to an attention kernel."""

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
"""Of vLLM's FlashAttentionMetadata, what a block has of its own."""
ALIKE = ("max_seq_len", "slot_mapping", "causal")
"""What holds for a block as for the step: a bound, what attention itself does not read, and the mask."""


def one_causality(causal: Any) -> bool:
    """Whether a step is causal.

    Raises:
        Refusal: vLLM says so of each request.
    """
    if isinstance(causal, torch.Tensor):
        raise Refusal(
            "this model uses a causal mask in some requests and none in others, which fastattention does not support; "
            "serve another model."
        )
    return bool(causal)


def can_be_cut(metadata: Any) -> bool:
    """Whether a step can be computed in blocks of rows: it is causal as a whole, and has only what is known here.

    What else vLLM's versions have describes requests or tokens too (cascades, prefixes of images, reference windows,
    decode context parallelism), so a step that has any of it stays whole.
    """
    if not isinstance(metadata.causal, bool) or not metadata.causal:
        return False
    others = {field.name for field in dataclasses.fields(metadata)}.difference(CUT, ALIKE)
    return not any(_is_set(getattr(metadata, name)) for name in others)


def _is_set(value: Any) -> bool:
    return value is not None and (not isinstance(value, int) or value != 0)


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
        """vLLM's metadata of the whole step, a FlashAttentionMetadata that :func:`can_be_cut`, for the block alone."""
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
