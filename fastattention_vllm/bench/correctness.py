"""Is a contender's answer right? A few rows of one layer against float64.

Used by: runner.py and volta.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fastattention_vllm.bench.cases import DTYPES, Case
from fastattention_vllm.bench.contender import Bound
from fastattention_vllm.bench.memory import random_tile

ALLOWED = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 0.15, "fp8": 0.7}
"""Largest error over the root mean square of the reference, by the coarser dtype of the case: loose enough for
probabilities rounded to bf16, far too tight for a wrong row, head or mask. fp8: vLLM 0.32's AMX kernel rounds more
than the cache, by 12 % on average and 50 % at worst; that is its accuracy, which the report shows, and no mistake."""
_ROWS = 4  # query rows of a sequence that are compared
_CHUNK_ELEMENTS = 1 << 21


@dataclass(frozen=True, slots=True)
class Verdict:
    """``error``: largest absolute difference over the root mean square of the reference."""

    error: float
    allowed: float

    @property
    def wrong(self) -> bool:
        return not self.error <= self.allowed  # NaN is wrong


class Checker:
    """Known K and V for the first and the last sequence, and what their first and last heads must answer."""

    def __init__(self, case: Case, query: torch.Tensor) -> None:
        self.case = case
        self.sequences = sorted({0, case.batch - 1})
        self.heads = sorted({0, case.num_kv_heads - 1})
        spread = torch.linspace(0, case.q_len - 1, min(_ROWS, case.q_len)).long()
        self.rows = sorted(set(spread.tolist()))
        tile = random_tile(DTYPES[case.kv_dtype])
        longest = min(case.page, case.kv_len) * case.num_kv_heads * case.head_size  # contenders take whole pages
        self._tile = tile.repeat(-(-longest // tile.numel()))
        by_group = query.view(case.batch, case.q_len, case.num_kv_heads, case.group, case.head_size)
        self._expected = [
            self._attend(by_group[sequence, self.rows, head].double(), *self._head(sequence, head))
            for sequence in self.sequences
            for head in self.heads
        ]

    def check(self, bound: Bound) -> Verdict:
        assert bound.load is not None
        for sequence in self.sequences:
            for start, key, value in self._chunks(sequence):
                bound.load(sequence, start, key, value)
        case = self.case
        out = bound.answer().view(case.batch, case.q_len, case.num_kv_heads, case.group, case.head_size)
        found = [out[sequence, self.rows, head] for sequence in self.sequences for head in self.heads]
        expected = torch.stack(self._expected)
        error = (torch.stack(found).double() - expected).abs().max() / expected.square().mean().sqrt()
        return Verdict(float(error), max(ALLOWED[case.dtype], ALLOWED[case.kv_dtype]))

    def _chunks(self, sequence: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(first token, key, value) of a few pages at a time, ``[tokens, KV heads, head_size]``."""
        case = self.case
        per_token = case.num_kv_heads * case.head_size
        step = max(1, _CHUNK_ELEMENTS // per_token // case.page) * case.page
        for start in range(0, case.kv_len, step):
            tokens = min(step, case.kv_len - start)
            yield start, self._piece(sequence, start, tokens, 1), self._piece(sequence, start, tokens, 2)

    def _piece(self, sequence: int, start: int, tokens: int, salt: int) -> torch.Tensor:
        size = tokens * self.case.num_kv_heads * self.case.head_size
        offset = (sequence * 7919 + start * 104729 + salt * 1299709) % (self._tile.numel() - size + 1)
        return self._tile[offset : offset + size].view(tokens, self.case.num_kv_heads, self.case.head_size)

    def _head(self, sequence: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        chunks = [(key[:, head].double(), value[:, head].double()) for _, key, value in self._chunks(sequence)]
        return torch.cat([key for key, _ in chunks]), torch.cat([value for _, value in chunks])

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """``query``: ``[rows, group, head_size]``, float64 as everything here."""
        last = torch.tensor(self.rows) + self.case.kv_len - self.case.q_len
        return attention(query, key, value, last)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Textbook attention of ``query`` ``[rows, group, head_size]`` to ``key`` and ``value`` ``[tokens, head_size]``.

    ``last``: the last key that each row sees. Exact enough to judge others by if all tensors are float64.
    """
    scores = torch.einsum("rgd,sd->rgs", query * query.shape[-1] ** -0.5, key)
    hidden = torch.arange(len(key), device=key.device) > last[:, None]
    scores.masked_fill_(hidden[:, None], -math.inf)
    return torch.einsum("rgs,sd->rgd", scores.softmax(-1), value)


def make_query(case: Case) -> torch.Tensor:
    """``[batch * q_len, heads, head_size]``; twice the usual size, so that some keys matter more than others."""
    generator = torch.Generator().manual_seed(1)
    shape = (case.batch * case.q_len, case.num_heads, case.head_size)
    return (2 * torch.randn(shape, generator=generator)).to(DTYPES[case.dtype])
