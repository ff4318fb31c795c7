"""A step's division on the NPU, with each launch within CANN's limit. It is copied once and serves all layers."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import torch

from fastattention_vllm.attention.ascend_triton.specializations import COMBINE_ROWS
from fastattention_vllm.attention.ascend_triton.work import Decoding, divide

MAX_PROGRAMS = 65535
"""Of one launch: CANN's limit."""
STEPS = 8
"""Divisions that are kept. Layers with other windows or heads have their own."""


@dataclass(frozen=True)
class DecodePart:
    """Sequences of one launch."""

    decoding: Decoding
    sequences: torch.Tensor
    """int64, as are ``tokens``: the sequences' query tokens, ``[sequences * tokens]``."""
    tokens: torch.Tensor
    lengths: torch.Tensor
    """int32: keys of each sequence."""


@dataclass(frozen=True)
class DeviceWork:
    starts: torch.Tensor
    """``[sequences + 1]`` int32; ``lengths``: ``[sequences]`` int32."""
    lengths: torch.Tensor
    tiles: tuple[torch.Tensor, ...]
    """For each prefill launch ``[tiles, 2]`` int32: sequence and first query token."""
    decodings: tuple[DecodePart, ...]


@functools.lru_cache(maxsize=STEPS)
def on_device(
    starts: tuple[int, ...],
    kept: tuple[int, ...],
    *,
    heads: int,
    kv_heads: int,
    tile_rows: int,
    causal: bool,
    device: torch.device,
) -> DeviceWork:
    """The division of a step with query tokens from ``starts[i]`` to ``starts[i + 1] - 1`` of sequence ``i``.

    Other arguments: as of :func:`divide`.
    """
    new = [after - before for before, after in itertools.pairwise(starts)]
    work = divide(new, kept, heads=heads, kv_heads=kv_heads, tile_rows=tile_rows, causal=causal)
    decodings = []
    for decoding in work.decodings:
        programs = kv_heads * max(decoding.splits, decoding.rows // COMBINE_ROWS)  # of one sequence
        count = max(1, MAX_PROGRAMS // programs)
        for first in range(0, len(decoding.sequences), count):
            some = replace(decoding, sequences=decoding.sequences[first : first + count])
            tokens = [starts[one] + token for one in some.sequences for token in range(some.tokens)]
            decodings.append(
                DecodePart(
                    some,
                    torch.tensor(some.sequences, device=device),
                    torch.tensor(tokens, device=device),
                    torch.tensor([kept[one] for one in some.sequences], dtype=torch.int32, device=device),
                )
            )
    tiles = torch.tensor(work.tiles, dtype=torch.int32, device=device)
    return DeviceWork(
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(kept, dtype=torch.int32, device=device),
        tiles.split(MAX_PROGRAMS // heads) if work.tiles else (),
        tuple(decodings),
    )
