"""torch's scaled_dot_product_attention, on contiguous K and V in the same huge pages: the best layout it can have.

Used by: contenders.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from fastattention_vllm.bench.cases import DTYPES, Case
from fastattention_vllm.bench.contender import Bound


class Sdpa:
    name = "sdpa"
    peer = "torch SDPA"

    def why_not(self, case: Case) -> str | None:
        if case.dtype != case.kv_dtype:
            return f"torch SDPA wants K and V in the query's dtype, not {case.kv_dtype}."
        return None

    def bind(self, case: Case, query: torch.Tensor, layers: Sequence[torch.Tensor]) -> Bound:
        caches = [_contiguous(case, layer) for layer in layers]
        by_head = query.view(case.batch, case.q_len, case.num_heads, case.head_size).transpose(1, 2).contiguous()
        square = case.q_len == case.kv_len
        mask = None
        if case.q_len > 1 and not square:  # is_causal is top-left aligned, so a chunk needs a mask of its own
            mask = torch.ones(case.q_len, case.kv_len, dtype=torch.bool).tril(case.kv_len - case.q_len)

        def call(key: torch.Tensor, value: torch.Tensor) -> Callable[[], torch.Tensor]:
            def run() -> torch.Tensor:
                out = scaled_dot_product_attention(
                    by_head,
                    key,
                    value,
                    attn_mask=mask,
                    is_causal=square and case.q_len > 1,
                    scale=case.head_size**-0.5,
                    enable_gqa=case.group > 1,
                )
                return out.transpose(1, 2).flatten(0, 1)

            return run

        return Bound([call(*cache) for cache in caches], _loader(caches[0]))


class SdpaFolded(Sdpa):
    """The query heads of a KV head become rows of one query, so that K and V are read once."""

    name = "sdpa folded"

    def why_not(self, case: Case) -> str | None:
        if case.q_len > 1 or case.group == 1:
            return "query heads fold into rows only where each has one row and several share a KV head."
        return super().why_not(case)

    def bind(self, case: Case, query: torch.Tensor, layers: Sequence[torch.Tensor]) -> Bound:
        caches = [_contiguous(case, layer) for layer in layers]
        folded = query.view(case.batch, case.num_kv_heads, case.group, case.head_size)

        def call(key: torch.Tensor, value: torch.Tensor) -> Callable[[], torch.Tensor]:
            def run() -> torch.Tensor:
                out = scaled_dot_product_attention(folded, key, value, scale=case.head_size**-0.5)
                return out.view(case.batch, case.num_heads, case.head_size)

            return run

        return Bound([call(*cache) for cache in caches], _loader(caches[0]))


def _contiguous(case: Case, layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, each ``[batch, KV heads, kv_len, head_size]``."""
    shape = (case.batch, case.num_kv_heads, case.kv_len, case.head_size)
    elements = layer.view(DTYPES[case.kv_dtype])
    half = elements.numel() // 2
    used = half // (case.pages_per_seq * case.page) * case.kv_len
    return elements[:used].view(shape), elements[half : half + used].view(shape)


def _loader(cache: tuple[torch.Tensor, torch.Tensor]) -> Callable[[int, int, torch.Tensor, torch.Tensor], None]:
    def load(sequence: int, first_token: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for mine, rows in zip(cache, (key, value), strict=True):
            mine[sequence, :, first_token : first_token + rows.shape[0]] = rows.transpose(0, 1)

    return load
