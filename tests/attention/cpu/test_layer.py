"""A layer object called step after step gives the same bits as `cpu.run` and `cpu.write_kv` for each single step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.cpu.layer import Batch, LayerAttention, LayerWriter
from fastattention_vllm.attention.problem import AttentionProblem
from tests.attention.oracle import Case

E4M3 = torch.float8_e4m3fn
LAYERS: list[dict[str, Any]] = [
    {},
    {"dtype": torch.bfloat16, "kv_dtype": E4M3, "key_scale": 0.5, "value_scale": 0.25},
    {"window": (20, -1), "softcap": 3.0, "alibi": "shared", "sinks": 1.0, "layout": "NHD"},
]


def steps_of(layer: dict[str, Any], lengths: list[list[tuple[int, int]]]) -> list[AttentionProblem]:
    """All steps share one cache and one layer's slopes; everything else is drawn for each step."""
    q_lens, kv_lens = zip(*max(lengths, key=lambda step: sum(-(-kv // 16) for _, kv in step)), strict=True)
    first = Case(q_lens, kv_lens, **layer).build()
    steps = []
    for step in lengths:
        built = Case(*(tuple(of) for of in zip(*step, strict=True)), **layer).build()
        table = (built.block_table % len(first.key)).to(torch.int32)  # type: ignore[operator]
        # unused rows hold NaN
        key, value = (x.copy_(x.float().nan_to_num().to(x.dtype)) for x in (first.key, first.value))
        same = {"key": key, "value": value, "alibi_slopes": first.alibi_slopes}
        steps.append(replace(built, block_table=table, **same))
    return steps


def run(attention: LayerAttention, step: AttentionProblem, out: torch.Tensor) -> None:
    assert step.block_table is not None
    batch = Batch(step.query_start_loc, step.seq_lens, step.block_table, step.causal)
    attention.run(step.query, batch, out, step.sinks, step.key_scale, step.value_scale)


STEP = st.lists(st.tuples(st.integers(1, 9), st.integers(9, 70)), min_size=1, max_size=4)


@given(layer=st.sampled_from(LAYERS), lengths=st.lists(STEP, min_size=2, max_size=4), data=st.data())
def test_steps(layer: dict[str, Any], lengths: list[list[tuple[int, int]]], data: st.DataObject) -> None:
    steps = steps_of(layer, lengths)
    attention = LayerAttention(steps[0], torch.empty_like(steps[0].query))
    for step in data.draw(st.permutations(steps)):
        step = replace(step, causal=data.draw(st.booleans()))
        if layer.get("kv_dtype"):  # weights may be reloaded
            step = replace(step, key_scale=data.draw(st.sampled_from([0.5, 2.0])), value_scale=0.75)
        if step.sinks is not None:
            step = replace(step, sinks=step.sinks + 1)
        padded = torch.cat([step.query, step.query[:2]])
        out = torch.full((len(padded), 4, 128), 7.0, dtype=step.query.dtype)[..., 32:96]  # rows with gaps between them
        run(attention, replace(step, query=padded), out)
        expected, _ = cpu.run(step)
        assert torch.equal(out[: len(expected)], expected)
        assert (out[len(expected) :] == 7.0).all(), "padding rows must not change"


def test_another_dtype_or_number_of_heads_is_accepted() -> None:
    (step,) = steps_of({}, [[(3, 20), (1, 40)]])
    attention = LayerAttention(step, torch.empty_like(step.query))
    for other in (step.query.half(), step.query.repeat(1, 2, 1)):
        changed = replace(step, query=other)
        out = torch.empty_like(other)
        run(attention, changed, out)
        assert torch.equal(out, cpu.run(changed)[0])


SEVERAL = steps_of({}, [[(3, 20), (1, 40)]])[0]


@pytest.mark.parametrize(
    ("change", "out", "message"),
    [
        ({"query": SEVERAL.query[..., ::2]}, None, "query must be contiguous in its last dimension|has head_size"),
        ({"query": SEVERAL.query.double()}, None, "query has dtype torch.float64"),
        ({"query": SEVERAL.query.to("meta")}, None, "query is on meta"),
        ({}, torch.zeros(4, 4, 32), r"out must be \[4, 4, 64\] torch.float32"),
        ({}, torch.zeros(4, 4, 64).half(), "out must be .* not .* torch.float16"),
        ({}, torch.zeros(4, 64, 4).transpose(1, 2), "out must be contiguous in its last dimension"),
        ({"sinks": torch.zeros(3)}, None, r"sinks must be \[4\] float32"),
        ({"seq_lens": SEVERAL.seq_lens.long()}, None, "seq_lens must be .* int32 on cpu, not .* torch.int64"),
        ({"query_start_loc": SEVERAL.query_start_loc[1:]}, None, r"query_start_loc must be \[3\] int32"),
        ({"block_table": torch.zeros(1, 3, dtype=torch.int32)}, None, r"block_table must be \[2, 3\] int32"),
        ({"seq_lens": SEVERAL.seq_lens + 1000}, None, "sequence 0 has 1020 KV tokens"),
        ({"key_scale": 2.0}, None, "key_scale must be 1 unless K and V are fp8"),
    ],
)
def test_steps_that_do_not_fit(change: dict[str, Any], out: torch.Tensor | None, message: str) -> None:
    attention = LayerAttention(SEVERAL, torch.empty_like(SEVERAL.query))
    step = replace(SEVERAL, **change)
    with pytest.raises(ValueError, match=message):
        run(attention, step, torch.empty_like(step.query) if out is None else out)
    again = torch.empty_like(SEVERAL.query)
    run(attention, SEVERAL, again)
    assert torch.equal(again, cpu.run(SEVERAL)[0]), "a refused step must not affect the next one"


@pytest.mark.parametrize(
    "problem", [Case((2,), (9,), page_size=0).build(), Case((2, 1), (9, 3), alibi="per sequence").build()]
)
def test_problems_that_only_run_supports(problem: AttentionProblem) -> None:
    with pytest.raises(ValueError, match=r"use cpu\.run for it"):
        LayerAttention(problem, torch.empty_like(problem.query))


def caches(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = torch.zeros(2, 4, 16, 2, 64).to(dtype)
    return key, value


@given(dtype=st.sampled_from([torch.float32, torch.bfloat16, E4M3]), data=st.data())
def test_writes(dtype: torch.dtype, data: st.DataObject) -> None:
    ours, expected = caches(dtype), caches(dtype)
    writer = LayerWriter(*ours)
    for _ in range(3):
        slots = torch.tensor(data.draw(st.lists(st.integers(0, 63), max_size=9, unique=True)), dtype=torch.int64)
        scales = (data.draw(st.sampled_from([0.5, 2.0])), 0.75) if dtype == E4M3 else (1.0, 1.0)
        of_states = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
        key, value = (
            torch.randn(len(slots) + 2, 2, width).to(of_states)[..., :64] for width in (96, 80)
        )  # padding rows included
        writer.write(key, value, slots, *scales)
        cpu.write_kv(key, value, *expected, slots, *scales)
        for mine, theirs in zip(ours, expected, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


ROWS, SLOTS = torch.zeros(3, 2, 64), torch.arange(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": ROWS[:, :1]}, "value must be"),
        ({"value": ROWS.half()}, "value must be"),
        ({"key": ROWS.double(), "value": ROWS.double()}, "key must be float32, float16 or bfloat16"),
        ({"key": ROWS.repeat(1, 2, 1), "value": ROWS.repeat(1, 2, 1)}, "key must be .* and the cache"),
        ({"key": ROWS.to("meta")}, "all tensors must be on cpu"),
        ({"key": torch.zeros(3, 2, 128)[..., ::2]}, "key must be contiguous in its last dimension"),
        ({"value": torch.zeros(3, 2, 128)[..., ::2]}, "value must be contiguous in its last dimension"),
        ({"slot_mapping": SLOTS.int()}, "slot_mapping must be a contiguous int64 vector"),
        ({"slot_mapping": torch.arange(6)[::2]}, "slot_mapping must be a contiguous int64 vector"),
        ({"slot_mapping": SLOTS.view(1, 3)}, "slot_mapping must be a contiguous int64 vector"),
        ({"slot_mapping": torch.arange(4)}, "slot_mapping has 4 tokens, but key has only 3"),
        ({"slot_mapping": SLOTS + 63}, "slot"),
        ({"key_scale": 2.0}, "key_scale must be 1"),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_writes_that_do_not_fit(first: bool, change: dict[str, Any], message: str) -> None:
    writer = LayerWriter(*caches(torch.float32))
    fine: dict[str, Any] = {"key": ROWS, "value": ROWS, "slot_mapping": SLOTS}
    write: Callable[..., None] = writer.write
    if not first:
        write(**fine)
    with pytest.raises(ValueError, match=message):
        write(**(fine | change))
    write(**fine)
