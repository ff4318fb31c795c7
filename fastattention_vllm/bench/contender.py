"""What a contender is, on every device, and the batch that contenders on CPUs are given.

Used by: runner.py, volta.py and every contender.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from fastattention_vllm.bench.cases import Case

LayerT = TypeVar("LayerT", contravariant=True)
"""What holds one layer's keys and values: raw memory on CPUs, tensors on GPUs."""
Call = Callable[[], torch.Tensor]
Load = Callable[[int, int, torch.Tensor, torch.Tensor], None]


def as_it_is(out: torch.Tensor) -> torch.Tensor:
    return out


@dataclass(frozen=True, slots=True)
class Bound:
    """A contender, ready to run one case."""

    calls: Sequence[Call]
    """One per layer: computes the case over that layer's keys and values."""
    load: Load | None = None
    """Where layers are raw memory: ``load(sequence, first_token, key, value)`` writes rows into layer 0. key and value
    are ``[tokens, KV heads, head_size]`` in the cache's dtype; ``first_token`` is a multiple of the page."""
    shaped: Callable[[torch.Tensor], torch.Tensor] = as_it_is
    """Brings what a call returned into the form ``[batch * q_len, heads, head_size]``; it is not timed."""

    def answer(self) -> torch.Tensor:
        """``[batch * q_len, heads, head_size]``, over layer 0."""
        return self.shaped(self.calls[0]())


class Contender(Protocol[LayerT]):
    name: str
    peer: str
    """Whom it stands for in the report: of several with the same peer, the fastest correct one counts."""

    def why_not(self, case: Case) -> str | None:
        """Why it cannot run ``case``, in one sentence."""

    def bind(self, case: Case, query: torch.Tensor, layers: Sequence[LayerT]) -> Bound:
        """``query``: ``[batch * q_len, heads, head_size]``."""


def block_table(case: Case) -> torch.Tensor:
    """``[batch, pages]`` int32: every page of a layer once, in an order that no prefetcher can guess."""
    generator = torch.Generator().manual_seed(2)
    pages = torch.randperm(case.batch * case.pages_per_seq, generator=generator)
    return pages.to(torch.int32).view(case.batch, case.pages_per_seq)


def sequence_tensors(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """``query_start_loc`` ``[batch + 1]`` and ``seq_lens`` ``[batch]``, int32."""
    starts = torch.arange(0, (case.batch + 1) * case.q_len, case.q_len, dtype=torch.int32)
    return starts, torch.full((case.batch,), case.kv_len, dtype=torch.int32)
