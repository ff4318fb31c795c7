"""The oracle (simple, slow attention in float64) and the problems on which kernels are compared with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.problem import AttentionProblem

# The error of one rounding of the output, as (relative, absolute), for outputs of about 1. fp32: the kernels sum up to
# a few thousand terms in fp32 blocks, and exp is good to 2 ulp. fp16 and bf16: the same fp32 arithmetic on the same
# rounded inputs, then one round-to-nearest, which is half a unit in the last place: 2^-11 and 2^-8 of the value.
OUTPUT_TOLERANCE = {
    torch.float32: (1e-5, 2e-6),
    torch.float16: (2**-11 + 1e-5, 2e-6),
    torch.bfloat16: (2**-8 + 1e-5, 2e-6),
}
LSE_TOLERANCE = (1e-6, 4e-6)

# Kernels on bf16 matrix units round the weights to bf16 (by at most 2^-8 of each), as FlashAttention-2 does, and use a
# shorter exponential (8.6e-5). For fp16 a weight is the sum of two bf16 numbers: the first is off by at most 2^-8 of
# it, and half a unit in the last place of the rest is 2^-17. (FlashAttention-2 rounds weights to fp16, by 2^-11.) That
# is the only difference; queries, keys, values and sums are as exact as elsewhere. Up to this many rows (query tokens
# times query heads per KV head) are computed in fp32 instead, with avx512_bf16 only where a row is no number of lines:
BF16_ISAS = {"amx": 2, "avx512_bf16": 4}
SPLIT_ISAS = {"amx": 6}
# Over an 8-bit cache, bf16 queries use the bf16 matrix unit if the head size is a multiple of 32 and a work item has
# more rows than this. All others are computed in fp32.
BYTES_ISAS = {"amx": {torch.int8: 4, torch.float8_e4m3fn: 0, torch.float8_e5m2: 0}}
ROW_BLOCK = 256
WEIGHT_ROUNDING = {torch.bfloat16: 2**-8 + 8.6e-5, torch.float16: 2**-17}


def attention(problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``out`` and ``lse`` in float64, one sequence and one head at a time. Padding rows are zero."""
    num_tokens, num_heads, head_size = problem.query.shape
    group = num_heads // problem.num_kv_heads
    out = torch.zeros(num_tokens, num_heads, head_size, dtype=torch.float64)
    lse = torch.zeros(num_tokens, num_heads, dtype=torch.float64)
    for seq in range(problem.num_seqs):
        begin, end = problem.query_start_loc[seq : seq + 2].tolist()
        kv_len = int(problem.seq_lens[seq])
        own = torch.arange(end - begin)[:, None] + kv_len - (end - begin)
        position = torch.arange(kv_len)[None, :]
        visible = torch.ones(end - begin, kv_len, dtype=torch.bool)
        if problem.causal:
            visible &= position <= own
        if problem.window[0] >= 0:
            visible &= position >= own - problem.window[0]
        if problem.window[1] >= 0:
            visible &= position <= own + problem.window[1]
        blind = ~visible.any(1)
        unseen = ~visible.any(0)  # the contents of unseen rows must not matter
        key, value = (
            _gather(problem, widened(cache, factors) * cache_scale, seq, kv_len).masked_fill(unseen[:, None, None], 0.0)
            for cache, factors, cache_scale in (
                (problem.key, problem.key_factors, problem.key_scale),
                (problem.value, problem.value_factors, problem.value_scale),
            )
        )
        for head in range(num_heads):
            score = problem.query[begin:end, head].double() @ key[:, head // group].T * problem.scale
            if problem.softcap > 0:
                score = problem.softcap * torch.tanh(score / problem.softcap)
            if problem.alibi_slopes is not None:
                slope = problem.alibi_slopes.expand(problem.num_seqs, num_heads)[seq, head].double()
                score = score - slope * (own - position).abs()
            score = score.masked_fill(~visible, -math.inf)
            if problem.sinks is not None:  # a sink is one more key, of value zero, that every row sees
                sink = problem.sinks[head].double().expand(end - begin, 1)
                score = torch.cat([score, sink], 1)
            lse[begin:end, head] = score.logsumexp(1)
            weight = score.softmax(1)[:, :kv_len].masked_fill(blind[:, None], 0.0)
            out[begin:end, head] = _sum_of_seen(weight, value[:, head // group], visible)
    return out, lse


def _sum_of_seen(weight: torch.Tensor, value: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """``weight @ value``, where NaN and infinity reach only rows that see them: 0 times NaN is NaN."""
    finite = value.isfinite()
    out = weight @ value.masked_fill(~finite, 0.0)
    for key in (~finite).any(1).nonzero().flatten().tolist():
        product = weight[:, key, None] * value[key].masked_fill(finite[key], 0.0)
        out += product.masked_fill(~visible[:, key, None], 0.0)
    return out


def widened(cache: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    return cache.double() if factors is None else cache.double() * factors.double()[..., None]


def _gather(problem: AttentionProblem, cache: torch.Tensor, seq: int, kv_len: int) -> torch.Tensor:
    """``[kv_len, num_kv_heads, head_size]`` of ``cache``, float64."""
    if problem.block_table is None:
        assert problem.kv_start_loc is not None
        start = int(problem.kv_start_loc[seq])
        return cache[start : start + kv_len]
    page_size, position = cache.shape[1], torch.arange(kv_len)
    return cache[problem.block_table[seq, position // page_size].long(), position % page_size]


def bf16_rows_in_fp32(isa: str, head_size: int) -> float:
    """Up to this many rows of bf16 have weights in fp32: all, where the instruction set has no products of bf16."""
    return 0 if isa == "avx512_bf16" and head_size % 32 == 0 else BF16_ISAS.get(isa, math.inf)


def weight_rounding(problem: AttentionProblem) -> torch.Tensor:
    """The relative error allowed for each token's weights with the instruction set in use, ``[num_tokens]`` float64.

    A few rows are computed in fp32: always those of a short sequence, sometimes those of a long sequence's last block.
    """
    rounding = torch.zeros(len(problem.query), dtype=torch.float64)
    dtype = problem.query.dtype
    if dtype == torch.bfloat16 and problem.key.element_size() == 1:
        few_by_dtype = BYTES_ISAS.get(cpu.isa(), {})
        rounded = _rows_of_items(problem, few_by_dtype.get(problem.key.dtype, math.inf))
        rounding[: len(rounded)][rounded] = WEIGHT_ROUNDING[dtype]
        return rounding
    few = math.inf
    if dtype == torch.bfloat16:
        few = bf16_rows_in_fp32(cpu.isa(), problem.query.shape[2])
    elif dtype == torch.float16:
        few = SPLIT_ISAS.get(cpu.isa(), math.inf)
    if few == math.inf or problem.key.dtype != dtype or problem.scale <= 0:
        return rounding
    group = problem.query.shape[1] // problem.key.shape[-2]
    tokens = torch.diff(problem.query_start_loc)
    many = torch.repeat_interleave(tokens * group > few, tokens)
    rounding[: len(many)][many] = WEIGHT_ROUNDING[dtype]
    return rounding


def _rows_of_items(problem: AttentionProblem, few: float) -> torch.Tensor:
    """Whether each token over an 8-bit cache is in a work item of more than ``few`` rows, ``[num_tokens]`` bool."""
    if problem.scale <= 0 or problem.query.shape[-1] % 32:
        few = math.inf
    group = problem.query.shape[1] // problem.key.shape[-2]
    tokens = max(1, ROW_BLOCK // group)
    found: list[bool] = []
    for q_len in torch.diff(problem.query_start_loc).tolist():
        for first in range(0, q_len, tokens):
            of_item = min(tokens, q_len - first)
            found += [of_item * group > few] * of_item
    return torch.tensor(found, dtype=torch.bool)


def assert_matches(
    problem: AttentionProblem,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    expected: tuple[torch.Tensor, torch.Tensor],
    slack: float = 1.0,
) -> None:
    """Check that rows of real query tokens equal the oracle's."""
    real = int(problem.query_start_loc[-1])
    rtol, atol = OUTPUT_TOLERANCE[problem.query.dtype]
    # Sums of many values of size one can cancel, so errors are relative to the values and not to the small result.
    scale = slack * max(1.0, float(expected[0][:real].abs().max())) if real else 1.0
    difference = (out[:real].double() - expected[0][:real]).abs()
    allowed = rtol * expected[0][:real].abs() + atol * scale
    rounding = weight_rounding(problem)[:real]
    rounded = (rounding > 0) & (problem.query.dtype == torch.bfloat16)

    def close() -> torch.Tensor:  # infinities come out as they are
        return (difference <= allowed) | (out[:real].double() == expected[0][:real])

    if rounding.any() and not close().all():
        size = attention(replace(problem, value=problem.value.abs()))[0][:real]  # sum of weight * |value|
        more = rounding[:, None, None]
        # weights below bf16's smallest number are lost
        allowed = torch.where(more > 0, allowed + more * size + 1e-30, allowed)
    far = ~close()
    worst = float((difference - allowed)[far].max()) if far.any() else 0.0
    assert not far.any(), f"{int(far.sum())} of {far.numel()} outputs are off, by {worst:.3g} more than allowed"
    if lse is not None:
        rtol, atol = LSE_TOLERANCE
        for rows, slack_of_rows in ((rounded, 8.6e-5), (~rounded, 0.0)):
            torch.testing.assert_close(
                lse[:real][rows].double(), expected[1][:real][rows], rtol=rtol, atol=atol + slack_of_rows
            )


def unused(kv_dtype: torch.dtype) -> float:
    """Filler for positions without a key."""
    return math.nan if kv_dtype.is_floating_point else 127


def stored(rows: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """The values that a cache of this dtype stores: torch's rounding, also to integers, within the dtype's range."""
    return rows.to(kv_dtype) if kv_dtype.is_floating_point else rows.round().clamp(-128, 127).to(kv_dtype)


def rounded_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 and the factor of each row, as ``write_kv`` stores them. Finite rows only."""
    factors = rows.float().abs().amax(-1) / 127
    divided = rows.float() / torch.where(factors == 0, 1.0, factors)[..., None]
    return divided.round().to(torch.int8), factors


@dataclass(frozen=True)
class Case:
    """Parameters of a random problem. ``page_size`` 0 means contiguous K and V."""

    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    layout: str = "HND"
    """``HND``: ``[blocks, heads, page, 2 * head_size]`` (vLLM 0.29 and later).
    ``NHD``: ``[blocks, 2, page, heads, head_size]``.
    """
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""
    """``""``, ``"shared"`` or ``"per sequence"``."""
    sinks: float | None = None
    """Mean of the heads' sinks, which are spread by about one. A sink of ``-math.inf`` changes nothing."""
    padding: int = 0
    """Number of padding rows after the last sequence's query tokens."""
    scale: float | None = None
    key_scale: float = 1.0
    """Scale of an fp8 cache: keys of about 1 are divided by it when they are stored."""
    value_scale: float = 1.0
    row_factors: bool = False
    """K and V are int8 with a factor for each row."""
    seed: int = 0

    def build(self) -> AttentionProblem:
        """Build the problem. K and V are in shuffled pages; unused pages, and rows after the last token, hold NaN."""
        random = torch.Generator().manual_seed(self.seed)
        kv_dtype = torch.int8 if self.row_factors else self.kv_dtype or self.dtype
        num_seqs = len(self.q_lens)
        total_q = sum(self.q_lens)
        # The shape that vLLM passes: rows of a wider tensor whose first part is the query.
        wide = torch.randn(total_q + self.padding, self.num_heads + 2, self.head_size, generator=random).to(self.dtype)
        wide[total_q:] = math.nan
        slopes = None
        if self.alibi:
            shape = (num_seqs, self.num_heads) if self.alibi == "per sequence" else (self.num_heads,)
            slopes = torch.rand(shape, generator=random)
        starts = [0]
        for q_len in self.q_lens:
            starts.append(starts[-1] + q_len)
        problem = AttentionProblem(
            query=wide[:, : self.num_heads],
            key=torch.empty(0),
            value=torch.empty(0),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(list(self.kv_lens), dtype=torch.int32),
            scale=self.head_size**-0.5 if self.scale is None else self.scale,
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
            alibi_slopes=slopes,
            sinks=None if self.sinks is None else self.sinks + torch.randn(self.num_heads, generator=random),
            key_scale=self.key_scale,
            value_scale=self.value_scale,
        )
        scales = (self.key_scale, self.value_scale)
        if self.page_size == 0:
            gap = 3  # rows between sequences that belong to no sequence
            shape = (sum(self.kv_lens) + gap * (num_seqs + 1), self.num_kv_heads, self.head_size)
            key, value = (torch.full(shape, unused(kv_dtype), dtype=kv_dtype) for _ in range(2))
            factors: list[torch.Tensor | None] = [None, None]
            if self.row_factors:
                factors = [torch.full(shape[:-1], math.nan) for _ in range(2)]
            first, kv_starts = gap, []
            for kv_len in self.kv_lens:
                kv_starts.append(first)
                for cache, of_rows, cache_scale in zip((key, value), factors, scales, strict=True):
                    rows = torch.randn(kv_len, *shape[1:], generator=random) / cache_scale
                    own = slice(first, first + kv_len)
                    if of_rows is None:
                        cache[own] = stored(rows, kv_dtype)
                    else:
                        cache[own], of_rows[own] = rounded_rows(
                            rows * torch.rand(*rows.shape[:-1], 1, generator=random) * 3
                        )
                first += kv_len + gap
            problem = replace(problem, key_factors=factors[0], value_factors=factors[1])
            return replace(problem, key=key, value=value, kv_start_loc=torch.tensor(kv_starts, dtype=torch.int32))

        pages = [-(-kv_len // self.page_size) for kv_len in self.kv_lens]
        num_blocks = sum(pages) + 2
        if self.layout == "HND":
            shape = (num_blocks, self.num_kv_heads, self.page_size, 2 * self.head_size)
            cache = torch.full(shape, unused(kv_dtype), dtype=kv_dtype)
            key, value = cache.transpose(1, 2).split(self.head_size, dim=-1)
        else:
            shape = (num_blocks, 2, self.page_size, self.num_kv_heads, self.head_size)
            cache = torch.full(shape, unused(kv_dtype), dtype=kv_dtype)
            key, value = cache.unbind(1)
        factors: list[torch.Tensor | None] = [None, None]
        if self.row_factors:
            # Beside each other for the tokens of a head, or for the heads of a token.
            wanted = (2, num_blocks, self.num_kv_heads, self.page_size)
            if self.layout == "HND":
                factors = list(torch.full(wanted, math.nan).transpose(2, 3))
            else:
                factors = list(torch.full((2, num_blocks, self.page_size, self.num_kv_heads), math.nan))
        order = torch.randperm(num_blocks, generator=random).to(torch.int32)
        block_table = torch.full((num_seqs, max(pages, default=0) + 1), -1, dtype=torch.int32)
        used = 0
        for seq, (kv_len, count) in enumerate(zip(self.kv_lens, pages, strict=True)):
            block_table[seq, :count] = order[used : used + count]
            used += count
            for cache, of_rows, cache_scale in zip((key, value), factors, scales, strict=True):
                rows = torch.randn(kv_len, self.num_kv_heads, self.head_size, generator=random)
                row_factors = None
                if of_rows is None:
                    rows = stored(rows / cache_scale, kv_dtype)
                else:
                    rows, row_factors = rounded_rows(rows * torch.rand(*rows.shape[:-1], 1, generator=random) * 3)
                for page in range(count):
                    own = slice(page * self.page_size, (page + 1) * self.page_size)
                    part = rows[own]
                    cache[block_table[seq, page], : len(part)] = part
                    if of_rows is not None and row_factors is not None:
                        of_rows[block_table[seq, page], : len(part)] = row_factors[own]
        problem = replace(problem, key_factors=factors[0], value_factors=factors[1])
        return replace(problem, key=key, value=value, block_table=block_table)
