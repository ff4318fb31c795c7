"""Steps of attention over pages of a KV cache, for the prefill and decode programs, in Triton.

A step is the paper's first-level block: its products run on the cube unit. The compiler cuts each block's rows into
second-level tiles for the two vector cores. ``propagate_nan=ALL`` makes ``tl.maximum`` one instruction; its default
adds compares and selects, and then the compiler no longer lets the cube run ahead of the vector cores.
"""

import triton
import triton.language as tl


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def one_page(query, keys, values, place, inside, top, total, acc, scale, DTYPE: tl.constexpr):
    """Attend to one page that every row sees in full."""
    score = tl.dot(query, tl.trans(tl.load(keys + place + inside))) * scale
    new_top = larger(top, tl.max(score, 1))
    shrink = tl.exp(top - new_top)
    weight = tl.exp(score - new_top[:, None])
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None] + tl.dot(weight.to(DTYPE), tl.load(values + place + inside))
    return new_top, total, acc


@triton.jit
def four_pages(query, keys, values, table, page, page_stride, inside, top, total, acc, scale, DTYPE: tl.constexpr):
    """Attend to four pages that every row sees in full: one maximum and one rescaling for all of them."""
    place0 = tl.load(table + page).to(tl.int64) * page_stride
    place1 = tl.load(table + page + 1).to(tl.int64) * page_stride
    place2 = tl.load(table + page + 2).to(tl.int64) * page_stride
    place3 = tl.load(table + page + 3).to(tl.int64) * page_stride
    score0 = tl.dot(query, tl.trans(tl.load(keys + place0 + inside))) * scale
    score1 = tl.dot(query, tl.trans(tl.load(keys + place1 + inside))) * scale
    score2 = tl.dot(query, tl.trans(tl.load(keys + place2 + inside))) * scale
    score3 = tl.dot(query, tl.trans(tl.load(keys + place3 + inside))) * scale
    new_top = larger(larger(top, tl.max(score0, 1)), tl.max(score1, 1))
    new_top = larger(larger(new_top, tl.max(score2, 1)), tl.max(score3, 1))
    shrink = tl.exp(top - new_top)
    weight0 = tl.exp(score0 - new_top[:, None])
    weight1 = tl.exp(score1 - new_top[:, None])
    weight2 = tl.exp(score2 - new_top[:, None])
    weight3 = tl.exp(score3 - new_top[:, None])
    total = total * shrink + tl.sum(weight0, 1) + tl.sum(weight1, 1) + tl.sum(weight2, 1) + tl.sum(weight3, 1)
    part = tl.dot(weight0.to(DTYPE), tl.load(values + place0 + inside))
    part = tl.dot(weight1.to(DTYPE), tl.load(values + place1 + inside), part)
    part = tl.dot(weight2.to(DTYPE), tl.load(values + place2 + inside), part)
    part = tl.dot(weight3.to(DTYPE), tl.load(values + place3 + inside), part)
    return new_top, total, acc * shrink[:, None] + part


@triton.jit
def masked_page(query, keys, values, place, inside, valid, hidden, top, total, acc, scale, DTYPE: tl.constexpr):
    """Attend to one page with a mask.

    ``hidden`` ``[rows, page]`` is added to the scores. A score of NaN or infinity stays one, so it also reaches rows of
    its sequence that do not see the key. Rows of the page that are not ``valid`` are not read, because
    they may hold anything, also NaN.
    """
    score = tl.dot(query, tl.trans(tl.load(keys + place + inside, mask=valid, other=0.0))) * scale
    score += hidden.to(tl.float32)
    new_top = larger(top, tl.max(score, 1))
    shrink = tl.exp(top - new_top)
    weight = tl.exp(score - new_top[:, None])
    total = total * shrink + tl.sum(weight, 1)
    value = tl.load(values + place + inside, mask=valid, other=0.0)
    return new_top, total, acc * shrink[:, None] + tl.dot(weight.to(DTYPE), value)


@triton.jit
def attend(
    query, keys, values, table, page_stride, inside, position, rows_hidden, first, kept, begin, end,
    window, zero, cap, left_zero, scale,
    ROWS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Attend to the pages ``begin`` to ``end - 1`` of one sequence. Returns each row's maximum, sum and result.

    Args:
        position: ``[PAGE]``, tokens of a page; ``inside``: their offsets in a page, ``[PAGE, HEAD]``.
        rows_hidden: addresses of the mask's first columns, ``[ROWS, PAGE]``; see ``masks.py``.
        first: position of the first row's token; ``kept``: number of keys of the sequence.
        window: keys before itself that a row sees.
    """
    top = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD], tl.float32)
    # Pages that the left edge of the window crosses, then pages that every row sees, then the rest.
    begin = tl.maximum(begin, tl.maximum(first - window, 0) // PAGE)
    inner = tl.maximum(tl.minimum((tl.maximum(first + ROWS - 1 - window, 0) + PAGE - 1) // PAGE, end), begin)
    full = tl.maximum(tl.minimum(tl.minimum(tl.maximum(first + 1, 0), kept) // PAGE, end), inner)
    if STEP == 4:
        full = inner + (full - inner) // 4 * 4
        for page in range(inner, full, 4):
            top, total, acc = four_pages(
                query, keys, values, table, page, page_stride, inside, top, total, acc, scale, DTYPE
            )
    else:
        for page in range(inner, full):
            place = tl.load(table + page).to(tl.int64) * page_stride
            top, total, acc = one_page(query, keys, values, place, inside, top, total, acc, scale, DTYPE)
    edges = inner - begin
    for number in range(edges + tl.maximum(end - full, 0)):
        page = full + number - edges
        column = zero - tl.minimum(first - page * PAGE, cap)
        if number < edges:
            page = begin + number
            column = left_zero - tl.maximum(first - window - page * PAGE, -PAGE)
        place = tl.load(table + page).to(tl.int64) * page_stride
        hidden = tl.load(rows_hidden + column)
        valid = (position < kept - page * PAGE)[:, None]
        top, total, acc = masked_page(query, keys, values, place, inside, valid, hidden, top, total, acc, scale, DTYPE)
    return top, total, acc
