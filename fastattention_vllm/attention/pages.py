"""Where keys and values lie, by plain torch operations that work on any device.

For kernels that read no pages, or that read contiguous sequences only back to back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def rows(key: torch.Tensor, value: torch.Tensor, first: Sequence[int], kv_lens: Sequence[int]) -> list[torch.Tensor]:
    """Both ``[sum of kv_lens, num_kv_heads, head_size]``, sequence by sequence without gaps. Views if there were none.

    ``key``, ``value``: ``[tokens, num_kv_heads, head_size]``; ``first``: row of each sequence's first token.
    """
    if all(begin + count == following for begin, count, following in zip(first, kv_lens, first[1:], strict=False)):
        where: slice | torch.Tensor = slice(first[0], first[0] + sum(kv_lens))
    else:
        spans = [torch.arange(begin, begin + count) for begin, count in zip(first, kv_lens, strict=True)]
        where = torch.cat(spans).to(key.device)
    return [key[where], value[where]]


def places(block_table: torch.Tensor, kv_lens: Sequence[int], page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and row in it of every KV token, sequence by sequence: int64 ``[sum of kv_lens]`` each.

    ``block_table``: int32 ``[num_seqs, blocks]``.
    """
    device = block_table.device
    lengths = torch.tensor(kv_lens, device=device)
    sequence = torch.repeat_interleave(torch.arange(len(kv_lens), device=device), lengths)
    begins = torch.cumsum(lengths, 0) - lengths
    position = torch.arange(len(sequence), device=device) - begins[sequence]
    return block_table[sequence, position // page].long(), position % page


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Scatter ``key`` and ``value`` ``[>= num_tokens, num_kv_heads, head_size]`` into pages of the same dtype.

    ``key_cache``, ``value_cache``: ``[num_blocks, page_size, num_kv_heads, head_size]``; ``slot_mapping``:
    ``[num_tokens]`` int64, a negative slot leaves its token out.

    Raises ``ValueError`` for a cache of another dtype, and for scales other than 1.
    """
    if key_cache.dtype != key.dtype or (key_scale, value_scale) != (1.0, 1.0):
        raise ValueError(
            f"the cache must hold {key.dtype} with scales of 1, not {key_cache.dtype} with scales of {key_scale} and "
            f"{value_scale}."
        )
    kept = slot_mapping >= 0
    slots, page = slot_mapping[kept], key_cache.shape[1]
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache[slots // page, slots % page] = rows[: len(slot_mapping)][kept]
