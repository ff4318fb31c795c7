"""Attention of few query tokens per sequence, in Triton. Not yet run on hardware.

Each program attends to a part of a sequence's keys, so that one long sequence keeps all cores busy. The query heads of
a KV head share the program that reads their keys. A second program combines the parts.
"""

import triton
import triton.language as tl

from fastattention_vllm.attention.ascend_triton.blocks import attend, larger

DECODE_ARGUMENTS = """
    query key value part_acc part_top part_total mask table lengths query_sequence query_head query_row
    page_stride token_stride kv_head_stride table_stride mask_stride scale window zero cap left_zero tokens
    pages splits used
""".split()


@triton.jit(do_not_specialize=DECODE_ARGUMENTS)
def decode(
    query, key, value, part_acc, part_top, part_total, mask, table, lengths,
    query_sequence, query_head, query_row, page_stride, token_stride, kv_head_stride, table_stride, mask_stride,
    scale, window, zero, cap, left_zero, tokens, pages, splits, used,
    HEAD: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Grid ``[sequences, kv_heads, splits]``; program ``[s, h, n]`` attends to ``pages`` pages from ``n * pages`` on.

    Args:
        tokens: query tokens of each sequence.
        query: ``used`` rows for each sequence and KV head: its query heads, token by token.
        part_acc: ``[sequences, kv_heads, splits, ROWS, HEAD]`` fp32; ``part_top``, ``part_total``: without ``HEAD``.
        mask: see ``masks.py``. Row ``r`` belongs to the token of query row ``r``.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    kept = tl.load(lengths + sequence)
    rows = tl.arange(0, ROWS)
    column = tl.arange(0, HEAD)
    position = tl.arange(0, PAGE)
    DTYPE: tl.constexpr = query.dtype.element_ty
    place = query + sequence * query_sequence + head * query_head
    asked = tl.load(place + rows[:, None] * query_row + column[None, :], mask=rows[:, None] < used, other=0.0)
    end = tl.minimum((split + 1) * pages, (kept + PAGE - 1) // PAGE)
    inside = head * kv_head_stride + position[:, None] * token_stride + column[None, :]
    rows_hidden = mask + rows[:, None] * mask_stride + position[None, :]
    top, total, acc = attend(
        asked, key, value, table + sequence * table_stride, page_stride, inside, position, rows_hidden, kept - tokens,
        kept, split * pages, end, window, zero, cap, left_zero, scale, ROWS, HEAD, PAGE, STEP, DTYPE,
    )  # fmt: skip
    part = ((sequence * tl.num_programs(1) + head) * splits + split) * ROWS
    tl.store(part_acc + (part + rows)[:, None] * HEAD + column[None, :], acc)
    tl.store(part_top + part + rows, top)
    tl.store(part_total + part + rows, total)


COMBINE_ARGUMENTS = """
    part_acc part_top part_total out lse lengths out_sequence out_head out_row lse_sequence lse_head pages
    splits part_rows used
""".split()


@triton.jit(do_not_specialize=COMBINE_ARGUMENTS)
def combine(
    part_acc, part_top, part_total, out, lse, lengths, out_sequence, out_head, out_row, lse_sequence, lse_head,
    pages, splits, part_rows, used, HEAD: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Merge the parts of :func:`decode`: grid ``[sequences, kv_heads, part_rows / ROWS]``.

    Args:
        part_rows: rows of a part.
        out: ``used`` rows for each sequence and KV head; ``lse``: the same, fp32, with adjacent rows.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HEAD)
    top = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD], tl.float32)
    parts = (tl.load(lengths + sequence) + PAGE * pages - 1) // (PAGE * pages)
    for split in range(parts):
        part = ((sequence * tl.num_programs(1) + head) * splits + split) * part_rows
        its_top = tl.load(part_top + part + rows)
        new_top = larger(top, its_top)
        shrink = tl.exp(top - new_top)
        its = tl.exp(its_top - new_top)
        total = total * shrink + tl.load(part_total + part + rows) * its
        acc = acc * shrink[:, None] + tl.load(part_acc + (part + rows)[:, None] * HEAD + column[None, :]) * its[:, None]
        top = new_top
    seen = larger(total, 1.0e-30)
    place = out + sequence * out_sequence + head * out_head + rows[:, None] * out_row + column[None, :]
    tl.store(place, (acc / seen[:, None]).to(out.dtype.element_ty), mask=rows[:, None] < used)
    sums = tl.where(total == 0.0, float("-inf"), top + tl.log(seen))  # NaN stays NaN
    tl.store(lse + sequence * lse_sequence + head * lse_head + rows, sums, mask=rows < used)
