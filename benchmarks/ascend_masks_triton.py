"""Prefill with other masks than the tiling-mask, to compare with: the Triton program of the package in other forms.

Used by: ascend_predicted.py, which compiles them and predicts their time. They never compute anything.
"""

import triton
import triton.language as tl

from fastattention_vllm.attention.ascend_triton.blocks import four_pages, larger, masked_page, one_page
from fastattention_vllm.attention.ascend_triton.masks import HIDDEN
from fastattention_vllm.attention.ascend_triton.prefill import PREFILL_ARGUMENTS

NOTHING, TILE, COMPARE, WHOLE = (tl.constexpr(number) for number in range(4))
"""How a page is masked: not at all (wrong, but the fastest), by a tile of the tiling-mask, by comparing positions, by a
tile of a mask for all queries and keys."""
NEVER: tl.constexpr = tl.constexpr(HIDDEN)


@triton.jit
def compared_page(query, keys, values, place, inside, valid, visible, top, total, acc, scale, DTYPE: tl.constexpr):
    score = tl.dot(query, tl.trans(tl.load(keys + place + inside, mask=valid, other=0.0))) * scale
    score = tl.where(visible, score, NEVER)
    new_top = larger(top, tl.max(score, 1))
    shrink = tl.exp(top - new_top)
    weight = tl.exp(score - new_top[:, None])
    total = total * shrink + tl.sum(weight, 1)
    value = tl.load(values + place + inside, mask=valid, other=0.0)
    return new_top, total, acc * shrink[:, None] + tl.dot(weight.to(DTYPE), value)


@triton.jit(do_not_specialize=PREFILL_ARGUMENTS)
def prefill(
    query, key, value, out, lse, mask, table, starts, lengths, tiles,
    query_token, query_head, out_token, out_head, lse_head, page_stride, token_stride, kv_head_stride, table_stride,
    mask_stride, scale, group, causal, window, zero, cap, left_zero,
    HEAD: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr,
    MASK: tl.constexpr, UNMASKED: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """As the package's prefill of one causal sequence without a window, but with a choice of masks.

    UNMASKED: pages that every row sees are computed without a mask. SKIP: pages that no row sees are not visited.
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
    end = (kept + PAGE - 1) // PAGE
    if SKIP:
        end = (tl.minimum(kept, first + ROWS) + PAGE - 1) // PAGE
    pages = table + sequence * table_stride
    inside = (head // group) * kv_head_stride + position[:, None] * token_stride + column[None, :]
    top = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD], tl.float32)
    full = 0
    if UNMASKED:
        full = tl.minimum(first + 1, kept) // PAGE // STEP * STEP
        if STEP == 4:
            for page in range(0, full, 4):
                top, total, acc = four_pages(
                    asked, key, value, pages, page, page_stride, inside, top, total, acc, scale, DTYPE
                )
        else:
            for page in range(full):
                place = tl.load(pages + page).to(tl.int64) * page_stride
                top, total, acc = one_page(asked, key, value, place, inside, top, total, acc, scale, DTYPE)
    for page in range(full, end):
        place = tl.load(pages + page).to(tl.int64) * page_stride
        valid = (position < kept - page * PAGE)[:, None]
        if MASK == NOTHING:
            top, total, acc = one_page(asked, key, value, place, inside, top, total, acc, scale, DTYPE)
        elif MASK == COMPARE:
            visible = (page * PAGE + position)[None, :] <= (first + rows)[:, None]
            top, total, acc = compared_page(
                asked, key, value, place, inside, valid, visible, top, total, acc, scale, DTYPE
            )
        else:
            where = mask + rows[:, None] * mask_stride + position[None, :]
            if MASK == TILE:
                where += zero - tl.minimum(first - page * PAGE, cap)
            else:
                where += row * mask_stride + page * PAGE
            hidden = tl.load(where)
            top, total, acc = masked_page(
                asked, key, value, place, inside, valid, hidden, top, total, acc, scale, DTYPE
            )
    seen = larger(total, 1.0e-30)
    tl.store(out + tokens * out_token + head * out_head + column[None, :], (acc / seen[:, None]).to(DTYPE), mask=real)
    sums = tl.where(total > 0.0, top + tl.log(seen), float("-inf"))
    tl.store(lse + head * lse_head + start + row + rows, sums, mask=rows < new - row)
