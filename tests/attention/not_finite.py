"""NaN and infinity in queries, keys and values: where a kernel must give them, and where it must not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from fastattention_vllm.attention.problem import AttentionProblem
from tests.attention import oracle

NUMBERS = (math.nan, math.inf, -math.inf)


@dataclass(frozen=True)
class Broken:
    """One number of a problem: ``token`` counts from the sequence's first query token, or from its first key."""

    part: str
    number: float
    seq: int
    token: int
    head: int
    column: int

    def put(self, problem: AttentionProblem) -> AttentionProblem:
        """The problem with this number in a copy of its tensors, of the same strides."""
        given = getattr(problem, self.part)
        # All of the storage, so that keys and values that share their pages keep their places in them.
        copied = torch.empty(0, dtype=given.dtype).set_(given.untyped_storage().clone())
        changed = torch.as_strided(copied, given.shape, given.stride(), given.storage_offset())
        changed[self._place(problem)] = torch.tensor(self.number).to(given.dtype)
        if self.part == "query":
            return replace(problem, query=changed)
        other = problem.value if self.part == "key" else problem.key
        if other.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
            other = torch.as_strided(copied, other.shape, other.stride(), other.storage_offset())
        both = {"key": changed, "value": other} if self.part == "key" else {"key": other, "value": changed}
        return replace(problem, **both)

    def _place(self, problem: AttentionProblem) -> tuple[int, ...]:
        if self.part == "query":
            return (int(problem.query_start_loc[self.seq]) + self.token, self.head, self.column)
        if problem.block_table is None:
            assert problem.kv_start_loc is not None
            return (int(problem.kv_start_loc[self.seq]) + self.token, self.head, self.column)
        page = problem.key.shape[1]
        return (int(problem.block_table[self.seq, self.token // page]), self.token % page, self.head, self.column)

    def beside(self, problem: AttentionProblem) -> torch.Tensor:
        """The outputs that kernels may also make NaN: those of this sequence, head and column, seen or not.

        A tile of values is multiplied for all rows that share it, and the weight 0 does not hide NaN or infinity.
        ``[tokens, heads, head_size]`` bool.
        """
        found = torch.zeros(problem.query.shape, dtype=torch.bool)
        if self.part == "value":
            begin, end = problem.query_start_loc[self.seq : self.seq + 2].tolist()
            group = problem.num_heads // problem.num_kv_heads
            found[begin:end, self.head * group : (self.head + 1) * group, self.column] = True
        return found


@st.composite
def broken(draw: st.DrawFn, problem: AttentionProblem) -> Broken:
    part = draw(st.sampled_from(["query", "key", "value"]))
    news = torch.diff(problem.query_start_loc).tolist()
    seq = draw(st.sampled_from([s for s, new in enumerate(news) if new > 0 and problem.seq_lens[s] > 0]))
    tensor: torch.Tensor = getattr(problem, part)
    # e4m3 has no infinities.
    numbers = NUMBERS if tensor.dtype != torch.float8_e4m3fn else (math.nan,)
    return Broken(
        part,
        draw(st.sampled_from(numbers)),
        seq,
        draw(st.integers(0, (news[seq] if part == "query" else int(problem.seq_lens[seq])) - 1)),
        draw(st.integers(0, tensor.shape[-2] - 1)),
        draw(st.sampled_from([0, 3, tensor.shape[-1] - 1])),
    )


def check(
    problem: AttentionProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    beside: torch.Tensor,
    tolerance: Any,
    lse_tolerance: Any,
) -> None:
    """Compare with float64.

    NaN is NaN. Infinity may be NaN too: a weight that is rounded to 0 makes it one. A row of which all scores are -inf
    has the softmax 0 / 0, and may be 0, as a row that sees no key. All else is as exact as without NaN and infinity,
    also what does not see them, but for ``beside``.

    Args:
        out: ``[tokens, heads, head_size]`` of real tokens; ``lse``: ``[tokens, heads]``.
        beside: see :meth:`Broken.beside`.
        tolerance: of finite outputs, relative and absolute; ``lse_tolerance``: likewise.
    """
    real = len(out)
    expected, expected_lse = (found[:real] for found in oracle.attention(problem))
    nothing = (expected_lse == -math.inf)[..., None].expand_as(expected)
    zero = nothing & (out == 0)
    is_nan = out.isnan()
    wrong = expected.isnan() & ~nothing & ~is_nan
    assert not wrong.any(), f"{int(wrong.sum())} outputs should be NaN, the first is {float(out[wrong][0])}"
    infinite = expected.isinf() & (out != expected) & ~is_nan
    assert not infinite.any(), f"{int(infinite.sum())} outputs should be infinite, the first is {out[infinite][0]}"
    finite = expected.isfinite() & ~(beside[:real] & is_nan) & ~zero
    torch.testing.assert_close(out[finite].double(), expected[finite], rtol=tolerance[0], atol=tolerance[1])
    assert (zero | is_nan | ~nothing).all(), "a row without a finite score must be 0 or NaN"

    lost = expected_lse.isnan() | (expected_lse == math.inf)
    kept = lse[lost].isnan() | (lse[lost] == math.inf)
    assert kept.all(), f"the log-sum-exp of NaN or +inf is {float(lse[lost][~kept][0])}"
    blind = expected_lse == -math.inf
    assert ((lse[blind] == -math.inf) | lse[blind].isnan()).all()
    seen = expected_lse.isfinite()
    torch.testing.assert_close(lse[seen].double(), expected_lse[seen], rtol=lse_tolerance[0], atol=lse_tolerance[1])
