"""Attention of many query tokens per sequence, in Triton. Not yet run on hardware."""

import triton
import triton.language as tl

from fastattention_vllm.attention.ascend_triton.blocks import attend, larger

PREFILL_ARGUMENTS = """
    query key value out lse mask table starts lengths tiles query_token query_head out_token out_head lse_head
    page_stride token_stride kv_head_stride table_stride mask_stride scale group causal window zero cap
    left_zero
""".split()


@triton.jit(do_not_specialize=PREFILL_ARGUMENTS)
def prefill(
    query, key, value, out, lse, mask, table, starts, lengths, tiles,
    query_token, query_head, out_token, out_head, lse_head, page_stride, token_stride, kv_head_stride, table_stride,
    mask_stride, scale, group, causal, window, zero, cap, left_zero,
    HEAD: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program per tile of ``ROWS`` query tokens and query head: grid ``[tiles, heads]``.

    Args:
        query, out: ``[tokens, heads, HEAD]``; ``key``, ``value``: ``[blocks, PAGE, kv_heads, HEAD]``.
        lse: ``[heads, tokens]`` fp32.
        mask: see ``masks.py``; ``zero``, ``cap``, ``left_zero`` are its columns.
        table: ``[sequences, blocks]``; ``starts``: ``[sequences + 1]``; ``lengths``: ``[sequences]``.
        tiles: ``[tiles, 2]``: sequence and first token of each tile.
        group: query heads per KV head; ``causal``: 1 or 0.
        window: keys before itself that a token sees.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    row = tl.load(tiles + 2 * tile + 1)
    start = tl.load(starts + sequence)
    new = tl.load(starts + sequence + 1) - start
    kept = tl.load(lengths + sequence)
    rows = tl.arange(0, ROWS)
    column = tl.arange(0, HEAD)
    position = tl.arange(0, PAGE)
    DTYPE: tl.constexpr = query.dtype.element_ty
    real = rows[:, None] < new - row
    tokens = (start + row + rows)[:, None]
    asked = tl.load(query + tokens * query_token + head * query_head + column[None, :], mask=real, other=0.0)
    first = row + kept - new
    if causal == 0:  # every token sees what the last token sees
        first = kept - 1
    end = (tl.minimum(kept, first + ROWS) + PAGE - 1) // PAGE
    inside = (head // group) * kv_head_stride + position[:, None] * token_stride + column[None, :]
    rows_hidden = mask + rows[:, None] * mask_stride + position[None, :]
    top, total, acc = attend(
        asked, key, value, table + sequence * table_stride, page_stride, inside, position, rows_hidden, first, kept,
        0, end, window, zero, cap, left_zero, scale, ROWS, HEAD, PAGE, STEP, DTYPE,
    )  # fmt: skip
    seen = larger(total, 1.0e-30)
    tl.store(out + tokens * out_token + head * out_head + column[None, :], (acc / seen[:, None]).to(DTYPE), mask=real)
    sums = tl.where(total == 0.0, float("-inf"), top + tl.log(seen))  # NaN stays NaN
    tl.store(lse + head * lse_head + start + row + rows, sums, mask=rows < new - row)
