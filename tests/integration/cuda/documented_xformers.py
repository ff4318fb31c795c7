"""xformers 0.0.34 as its documentation defines it, in PyTorch on any device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass
class Mask:
    """xformers.ops.fmha.attn_bias.BlockDiagonalMask and the masks derived from it, as documented in 0.0.34."""

    q_lens: list[int]
    kv_lens: list[int]
    causal: bool = False
    window: int | None = None

    @classmethod
    def from_seqlens(cls, q_seqlen: list[int], kv_seqlen: list[int] | None = None) -> Mask:
        return cls(q_seqlen, kv_seqlen or q_seqlen)

    def make_causal_from_bottomright(self) -> Mask:
        return replace(self, causal=True)

    def make_local_attention_from_bottomright(self, window_size: int) -> Mask:
        return replace(self, causal=True, window=window_size)

    def materialize(self, shape: tuple[int, int]) -> torch.Tensor:
        """0 and minus infinity, ``[queries, keys]``.

        A query at distance X from the final query cannot attend to a key whose distance to the final key is less than
        X, or X + window_size or more.
        """
        found = torch.full(shape, -torch.inf)
        row = column = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            from_last_query = torch.arange(q_len - 1, -1, -1)[:, None]
            from_last_key = torch.arange(kv_len - 1, -1, -1)[None]
            visible = torch.ones(q_len, kv_len, dtype=torch.bool)
            if self.causal:
                visible &= from_last_key >= from_last_query
            if self.window is not None:
                visible &= from_last_key < from_last_query + self.window
            found[row : row + q_len, column : column + kv_len].masked_fill_(visible, 0.0)
            row, column = row + q_len, column + kv_len
        return found


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """The equivalent PyTorch code of xformers' documentation, for ``[B, M, H, K]`` and ``[B, M, G, H, K]``."""
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert query.dim() == key.dim() == value.dim()
    assert key.shape[2:] == value.shape[2:] == query.shape[2:], "xformers does not broadcast heads"
    shape, dtype = query.shape, query.dtype
    query, key, value = (part.flatten(2, -2).double().transpose(1, 2) for part in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    weights = query * scale @ key.transpose(-2, -1) + attn_bias.materialize((query.shape[-2], key.shape[-2]))
    return (weights.softmax(-1) @ value).transpose(1, 2).reshape(shape).to(dtype)
