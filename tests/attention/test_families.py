"""The same problems for every kernel family: each result equals the definition, or the family refuses it by name."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastattention_vllm import fast_attn_func, fast_attn_varlen_func
from fastattention_vllm.attention import flash
from fastattention_vllm.attention.kernels import FAMILIES
from fastattention_vllm.attention.problem import AttentionProblem
from tests.attention import families, not_finite, oracle
from tests.attention.families import FEATURES, UNDER_TEST, UnderTest
from tests.attention.not_finite import Broken
from tests.attention.oracle import Case

SEQUENCES = {"varlen": ((5, 20, 1), (50, 20, 30)), "long and single": ((1, 70, 1), (200, 90, 1))}


@pytest.fixture(params=UNDER_TEST)
def tested(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> UnderTest:
    return families.use(request.param, monkeypatch)


def problem_of(tested: UnderTest, feature: str, q_lens: Any, kv_lens: Any, **changes: Any) -> AttentionProblem:
    """The oracle's problem for the arguments of ``feature``."""
    given = FEATURES[feature]
    case = Case(
        q_lens,
        kv_lens,
        **{
            "head_size": tested.head_size,
            "page_size": 0,
            "dtype": tested.dtype,
            "layout": "NHD",
            "causal": given.get("causal", False),
            "window": given.get("window_size", (-1, -1)),
            "softcap": given.get("softcap", 0.0),
            "scale": given.get("softmax_scale"),
        }
        | changes,
    )
    problem = case.build()
    parts = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
    tidy = {name: parts[name].float().nan_to_num(0.0).to(parts[name].dtype).contiguous() for name in ("key", "value")}
    return AttentionProblem(**parts | tidy | {name: given.get(name) for name in ("alibi_slopes", "sinks")})


def ask(problem: AttentionProblem, feature: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``fast_attn_varlen_func``; returns ``out``, and ``lse`` as ``[tokens, heads]``."""
    lengths = problem.seq_lens
    key, value = problem.key, problem.value
    if problem.kv_start_loc is not None:  # this interface has no gaps between sequences
        rows = torch.cat([torch.arange(s, s + n) for s, n in zip(problem.kv_start_loc, lengths, strict=True)])
        key, value = key[rows], value[rows]
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    longest = int(torch.diff(problem.query_start_loc).max()), int(lengths.max())
    out, lse, _ = fast_attn_varlen_func(
        problem.query,
        key,
        value,
        problem.query_start_loc,
        ends,
        *longest,
        return_attn_probs=True,
        block_table=problem.block_table,
        **FEATURES[feature],
    )
    return out, lse.T


def assert_right(tested: UnderTest, problem: AttentionProblem, out: torch.Tensor, lse: torch.Tensor) -> None:
    expected, expected_lse = oracle.attention(problem)
    rtol, atol = tested.output
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tested.lse[0], atol=tested.lse[1])


def refused(tested: UnderTest, what: str, call: Any) -> bool:
    """Whether the family refuses ``what``. If so, check that it does in one sentence that names it."""
    sentence = tested.refuses.get(what)
    if sentence is None:
        return False
    with pytest.raises(ValueError, match=sentence) as error:
        call()
    assert len(re.findall(r"\. [A-Z]", str(error.value))) == 0, "the refusal must be one sentence"
    return True


@pytest.mark.parametrize("page", ["contiguous", "paged"])
@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("feature", FEATURES)
def test_ragged_sequences(tested: UnderTest, feature: str, sequences: str, page: str) -> None:
    problem = problem_of(tested, feature, *SEQUENCES[sequences], page_size=tested.page if page == "paged" else 0)
    if not refused(tested, feature, lambda: ask(problem, feature)):
        assert_right(tested, problem, *ask(problem, feature))


@pytest.mark.parametrize("layout", ["contiguous", "heads first"])
@pytest.mark.parametrize("feature", FEATURES)
def test_sequences_of_one_length(tested: UnderTest, feature: str, layout: str) -> None:
    problem = problem_of(tested, feature, (20, 20, 20), (50, 50, 50))
    assert problem.kv_start_loc is not None
    q = problem.query.unflatten(0, (3, 20))
    k, v = (
        torch.stack([rows[start : start + 50] for start in problem.kv_start_loc.tolist()])
        for rows in (problem.key, problem.value)
    )
    if layout == "heads first":  # [B, H, S, D] in memory, as torch SDPA has them
        q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v))
    if refused(tested, feature, lambda: fast_attn_func(q, k, v, **FEATURES[feature])):
        return
    out, lse, _ = fast_attn_func(q, k, v, return_attn_probs=True, **FEATURES[feature])
    assert_right(tested, problem, out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1))
    assert torch.equal(fast_attn_func(q, k, v, **FEATURES[feature]), out)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 3)], ids=str)
def test_query_heads_share_kv_heads(tested: UnderTest, heads: tuple[int, int]) -> None:
    problem = problem_of(tested, "causal", (5, 20, 1), (50, 20, 30), num_heads=heads[0], num_kv_heads=heads[1])
    assert_right(tested, problem, *ask(problem, "causal"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(tested: UnderTest, dtype: torch.dtype) -> None:
    problem = problem_of(tested, "causal", (5, 20, 1), (50, 20, 30), dtype=dtype)
    if refused(tested, str(dtype), lambda: ask(problem, "causal")):
        return
    out, _ = ask(problem, "causal")
    expected, _ = oracle.attention(problem)
    rtol, atol = oracle.OUTPUT_TOLERANCE[dtype]
    rounding = oracle.weight_rounding(problem).max().item() if tested is UNDER_TEST["cpu"] else 0.0
    slack = max(atol, tested.output[1]) + rounding * float(problem.value.abs().max())
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=slack)


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": (2, 50, 3, 64), "v": (2, 50, 3, 64)},
        {"v": (2, 40, 2, 64)},
        {"k": (2, 50, 2, 128), "v": (2, 50, 2, 128)},
        {"sinks": (3,)},
        {"alibi_slopes": (3,)},
    ],
    ids=["no multiple of KV heads", "fewer values", "another head size", "sinks", "slopes"],
)
@pytest.mark.parametrize("name", ["cpu", "volta"])  # the kernels of these two do not check shapes
def test_shapes_that_do_not_fit_are_refused(
    name: str, wrong: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tested = families.use(name, monkeypatch)
    given = {"q": (2, 20, 4, 64), "k": (2, 50, 2, 64), "v": (2, 50, 2, 64)} | wrong
    tensors = {
        part: torch.zeros(shape, dtype=torch.float32 if len(shape) == 1 else tested.dtype)
        for part, shape in given.items()
    }
    with pytest.raises(ValueError, match=r"heads|head_size|must match|same shape|must be \[4\]"):
        fast_attn_func(**tensors)


@pytest.mark.parametrize(
    ("page", "changes", "sentence"),
    [
        (0, {"cu_seqlens_q": [0, 5, 27]}, "cu_seqlens_q ends with 27, but q has 25 tokens"),
        (0, {"cu_seqlens_k": [0, 50, 71]}, "cu_seqlens_k ends with 71, but k has 70 tokens"),
        (128, {"cu_seqlens_k": [0, 50, 179]}, "a sequence of 129 tokens, but block_table has pages for 128"),
        (0, {"cu_seqlens_k": [0, 50]}, "cu_seqlens_q has 3 entries and cu_seqlens_k 2"),
        (128, {"cu_seqlens_q": [0, 5, 6, 7], "cu_seqlens_k": [0, 5, 6, 7]}, r"block_table is \[2, 1\], .* 3 sequences"),
    ],
)
def test_lengths_beyond_the_tensors_are_refused(
    tested: UnderTest, page: int, changes: dict[str, list[int]], sentence: str
) -> None:
    q = torch.zeros(25, 4, 64, dtype=tested.dtype)
    k = torch.zeros(*((2, page) if page else (70,)), 2, 64, dtype=tested.dtype)
    ends = {"cu_seqlens_q": [0, 5, 25], "cu_seqlens_k": [0, 50, 70]} | changes
    table = torch.tensor([[0], [1]], dtype=torch.int32) if page else None
    given = {name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in ends.items()}
    with pytest.raises(ValueError, match=sentence):
        fast_attn_varlen_func(q, k, k, **given, max_seqlen_q=20, max_seqlen_k=200, block_table=table)


@pytest.mark.parametrize(("part", "number"), [("key", math.nan), ("key", math.inf), ("query", math.nan)])
def test_nan_and_infinity(tested: UnderTest, part: str, number: float) -> None:
    """They reach the rows that see them, and no other. Some rows see no key: their log-sum-exp stays -inf."""
    kv_lens = (50, 20 if tested is UNDER_TEST["ascend"] else 8, 30)
    one = Broken(part, number, 0, 3, 0, 5)
    problem = one.put(problem_of(tested, "causal", (5, 20, 1), kv_lens))
    not_finite.check(problem, *ask(problem, "causal"), one.beside(problem), tested.output, tested.lse)


def test_head_sizes(tested: UnderTest) -> None:
    problem = problem_of(tested, "causal", (5, 20, 1), (50, 20, 30), head_size=128)
    assert_right(tested, problem, *ask(problem, "causal"))
    odd = problem_of(tested, "causal", (5, 20, 1), (50, 20, 30), head_size=20)
    assert refused(tested, "head size 20", lambda: ask(odd, "causal"))


def test_queries_before_the_first_key_see_nothing(tested: UnderTest) -> None:
    problem = problem_of(tested, "causal", (5, 20, 1), (50, 8, 30))
    if tested is UNDER_TEST["ascend"]:
        with pytest.raises(ValueError, match="a sequence has 20 query tokens but only 8 keys"):
            ask(problem, "causal")
        return
    out, lse = ask(problem, "causal")
    assert (out[5:17] == 0).all()
    assert (lse[5:17] == -math.inf).all()
    assert_right(tested, problem, out, lse)


@pytest.mark.parametrize("tokens", [1, 3, 40])  # a decode token, a prompt of one block, and a prompt of several blocks
def test_empty_queries_and_keys(tested: UnderTest, tokens: int) -> None:
    q, k = torch.zeros(2, tokens, 4, 64, dtype=tested.dtype), torch.zeros(2, 0, 2, 64, dtype=tested.dtype)
    out, lse, _ = fast_attn_func(q, k, k, return_attn_probs=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert fast_attn_func(q[:, :0], q[:, :, :2], q[:, :, :2]).shape == (2, 0, 4, 64)


@pytest.mark.parametrize(
    ("version", "changes", "sentence"),
    [
        (2, {"sinks": families.SINKS}, "FlashAttention 2, which vLLM chooses on this GPU, does not support sinks"),
        (3, {"sinks": families.SINKS, "dtype": torch.float16}, r"sinks need a bfloat16 query, not torch\.float16"),
        (3, {"alibi_slopes": families.SLOPES}, "vLLM's FlashAttention does not support alibi_slopes here; use the CPU"),
        (2, {"dtype": torch.float32}, r"query is torch\.float32, .* FlashAttention needs"),
        (2, {"head_size": 20}, "head_size is 20, but FlashAttention supports multiples of 8"),
        (3, {"head_size": 320}, "head_size is 320, but FlashAttention 3 supports up to 256"),
        (4, {"head_size": 320}, None),
        (3, {"sinks": families.SINKS}, None),
        (2, {"softcap": 3.0}, None),
        (2, {"window": (7, 3)}, None),
    ],
)
def test_refusals_of_vllms_flash_attention(
    version: int, changes: dict[str, Any], sentence: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    families.refuse_flash(monkeypatch, version)
    tensors = {name: changes.get(name) for name in ("sinks", "alibi_slopes")}
    numbers = {name: changes[name] for name in changes.keys() - tensors.keys()}
    case = Case((5, 1), (50, 30), **{"dtype": torch.bfloat16, "page_size": 0} | numbers)
    problem = case.build()
    parts = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
    reason = flash.can_run(AttentionProblem(**parts | tensors))
    assert reason is None if sentence is None else re.search(sentence, str(reason))


@pytest.mark.parametrize("name", ["cpu", "torch_flash", "ascend"])
def test_keys_with_gaps_between_sequences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = families.use(name, monkeypatch)
    problem = problem_of(tested, "causal", (5, 20, 1), (50, 20, 30))
    assert problem.kv_start_loc is not None
    assert int(problem.kv_start_loc[1]) > 50
    out, lse = torch.full_like(problem.query, 7), torch.full(problem.query.shape[:2], 7.0)
    tested.module.run(problem, out=out, lse=lse)
    assert_right(tested, problem, out, lse)


def test_results_have_rows_of_padding(tested: UnderTest) -> None:
    problem = problem_of(tested, "causal", (5, 20, 1), (50, 20, 30), page_size=tested.page)
    padded = replace(problem, query=torch.cat([problem.query[:26], problem.query[:3]]))
    out, lse = tested.module.run(padded, return_lse=True)
    assert (out.shape, lse.shape) == (padded.query.shape, padded.query.shape[:2])
    assert_right(tested, replace(problem, query=problem.query[:26]), out[:26], lse[:26])
    filled, filled_lse = torch.full_like(padded.query, 7), torch.full(padded.query.shape[:2], 7.0)
    given, given_lse = tested.module.run(padded, out=filled, lse=filled_lse, return_lse=True)
    assert given is filled
    assert given_lse is filled_lse
    assert torch.equal(filled[:26], out[:26])
    assert torch.equal(filled_lse[:26], lse[:26])
    assert (filled[26:] == 7).all()
    assert (filled_lse[26:] == 7).all()


@pytest.mark.parametrize("name", ["cpu", "torch_flash", "ascend"])
def test_new_rows_are_written_into_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = families.use(name, monkeypatch)
    key, value = (torch.randn(5, 2, 64, dtype=tested.dtype) for _ in range(2))
    caches = [torch.full((3, 16, 2, 64), 7, dtype=tested.dtype) for _ in range(2)]
    slots = torch.tensor([47, -1, 0, 16, 31])
    tested.module.write_kv(key, value, *caches, slots)
    for rows, cache in zip((key, value), caches, strict=True):
        flat = cache.flatten(0, 1)
        expected = torch.full_like(flat, 7)
        expected[slots[[0, 2, 3, 4]]] = rows[[0, 2, 3, 4]]
        assert torch.equal(flat, expected)
    if name != "cpu":
        with pytest.raises(
            ValueError, match=r"the cache must hold torch\.float16 with scales of 1, not .* of 2\.0 and"
        ):
            tested.module.write_kv(key, value, *caches, slots, 2.0, 1.0)


def test_a_torch_that_pads_the_log_sum_exp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(families.use("torch_flash", monkeypatch), "causal", (5, 20, 1), (50, 20, 30))

    def padded(query: torch.Tensor, *others: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(query), torch.zeros(3, query.shape[1], 20)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", padded)
    with pytest.raises(ValueError, match=r"pads the log-sum-exp .*; install torch 2\.10 or newer"):
        ask(problem, "causal")


def test_every_family_of_the_registry_is_tested() -> None:
    elsewhere = {"flash", "ascend_triton"}  # on GPUs, and with Triton's interpreter
    assert {family.name for family in FAMILIES} == {*UNDER_TEST, *elsewhere}
    for name, tested in UNDER_TEST.items():
        assert next(family for family in FAMILIES if family.name == name).load() is tested.module
