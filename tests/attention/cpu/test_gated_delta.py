"""The kernels of Gated DeltaNet layers against their definition in float64, on each instruction set of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.cpu.gated_delta import gated_norm
from tests.attention.cpu.delta_oracle import Case, Problem, definition

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Relative errors: of sums in fp32, and half a unit in the last place of the others."""

LENGTHS = {
    "one token of each request": (1, 1, 1),
    "less than the convolution": (2, 3),
    "a chunk and its borders": (63, 64, 65),
    "several chunks": (200,),
    "a prompt beside decoding": (1, 70, 0, 1),
}


def compare(case: Case) -> None:
    problem = Problem(case)
    wanted = definition(problem)
    problem.run()
    got = (problem.out, problem.inputs, problem.states)
    for one, other in zip(got, wanted, strict=True):
        rounding = ROUNDING[one.dtype]
        # NaN stays in the slots that no request has.
        torch.testing.assert_close(one.double(), other, rtol=2 * rounding, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths(name: str, isa: str) -> None:
    compare(Case(LENGTHS[name], seed=len(name)))


@pytest.mark.parametrize("states_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype, states_dtype: torch.dtype, isa: str) -> None:
    compare(Case((1, 40), dtype=dtype, inputs_dtype=dtype, states_dtype=states_dtype))


CHANGES: dict[str, dict[str, Any]] = {
    "old content counts as zero": {"begun": (False, False, True, False)},
    "bias": {"bias": True},
    "no activation": {"activation": None},
    "two inputs": {"width": 2},
    "three inputs": {"width": 3},
    "channels first": {"channels_first": True, "inputs_dtype": torch.bfloat16},
    "as many key heads": {"value_heads": 2},
    "one key head": {"key_heads": 1, "value_heads": 3},
    "small heads": {"key_size": 8, "value_size": 8},
    "large heads": {"key_size": 128, "value_size": 128},
    "largest heads": {"key_size": 256, "value_size": 256, "key_heads": 1, "value_heads": 1},
}


@pytest.mark.parametrize("name", CHANGES)
def test_layers(name: str, isa: str) -> None:
    compare(replace(Case((1, 2, 70, 1)), **CHANGES[name]))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 140), min_size=1, max_size=3),
    key_heads=st.integers(1, 3),
    repeats=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    data=st.data(),
)
def test_any_shape(
    lengths: list[int], key_heads: int, repeats: int, sizes: tuple[int, int], data: st.DataObject
) -> None:
    begun = tuple(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    compare(Case(tuple(lengths), key_heads, key_heads * repeats, 8 * sizes[0], 8 * sizes[1], begun=begun))


DRAFTS: dict[str, dict[str, Any]] = {
    "all accepted, and one": {"lengths": (4, 4), "verified": (4, 1)},
    "fewer drafts than before": {"lengths": (2, 1, 3), "verified": (4, 3, 1)},
    "beside a prompt and decoding": {"lengths": (40, 3, 1, 0, 5), "verified": (0, 2, 0, 2, 5)},
    "a new prompt beside them": {"lengths": (3, 9), "verified": (2, 0), "begun": (True, False)},
    "more drafts than a chunk": {"lengths": (40, 70), "verified": (33, 70), "key_heads": 1, "value_heads": 1},
    "16 bits": {"lengths": (3, 2), "verified": (3, 2), "dtype": torch.bfloat16, "states_dtype": torch.float16},
    "channels first": {"lengths": (3, 5), "verified": (2, 5), "channels_first": True},
    "two inputs": {"lengths": (3, 2), "verified": (1, 3), "width": 2, "inputs_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("name", DRAFTS)
def test_draft_tokens_keep_a_state_each(name: str, isa: str) -> None:
    compare(Case(**DRAFTS[name]))


@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    width=st.integers(2, 4),
    key_heads=st.integers(1, 2),
    seed=st.integers(0, 9),
)
def test_any_drafts(requests: list[tuple[int, int]], width: int, key_heads: int, seed: int) -> None:
    lengths, verified = zip(*requests, strict=True)
    compare(Case(lengths, key_heads, 2 * key_heads, 8, 16, width, verified=verified, seed=seed))


def test_rejected_tokens_leave_no_trace() -> None:
    """A step after drafts of which two were accepted equals the step after these two tokens alone."""
    drafted = Problem(Case((4,), verified=(3,), seed=3))
    drafted.run()
    rows = slice(2, 4)
    one = {name: getattr(drafted, name)[rows] for name in ("x", "a", "b", "out")}
    expected, inputs, states = drafted.out[rows].clone(), drafted.inputs.clone(), drafted.states.clone()
    assert drafted.state_slots is not None
    # The first two tokens were accepted. The others are computed again.
    drafted.run(**one, query_start_loc=torch.tensor([0, 2], dtype=torch.int32), verified=torch.tensor([2]).int())
    assert torch.equal(drafted.out[rows], expected)
    for before, after in zip(drafted.state_slots[0, 2:4].tolist(), drafted.state_slots[0, :2].tolist(), strict=True):
        assert torch.equal(drafted.states[after], states[before])
    kept = drafted.case.width - 1
    assert torch.equal(drafted.inputs[drafted.slots[0], 1 : 1 + kept], inputs[drafted.slots[0], 3 : 3 + kept])


@settings(max_examples=15, deadline=None)
@given(cuts=st.sets(st.integers(1, 149), max_size=4))
def test_states_carry_a_prompt_from_step_to_step(cuts: set[int]) -> None:
    """A prompt in several steps, cut anywhere, equals the prompt at once."""
    whole, parts = Problem(Case((150,), begun=(False,))), Problem(Case((150,), begun=(False,)))
    whole.run()
    ends = [*sorted(cuts), 150]
    for first, end in zip([0, *ends], ends, strict=False):
        rows = slice(first, end)
        parts.run(
            x=parts.x[rows],
            a=parts.a[rows],
            b=parts.b[rows],
            out=parts.out[rows],
            query_start_loc=torch.tensor([0, end - first], dtype=torch.int32),
            begun=torch.tensor([first > 0]),
        )
    slot = whole.slots
    torch.testing.assert_close(parts.out, whole.out, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(parts.states[slot], whole.states[slot], rtol=1e-4, atol=2e-5)
    assert torch.equal(parts.inputs[slot], whole.inputs[slot])


def test_strong_decays_do_not_spoil_weak_ones() -> None:
    """After one token that forgets everything, the sum of logarithms is large, and its differences still count."""
    problem = Problem(Case((60,), key_heads=1, value_heads=1))
    problem.a_log[:], problem.dt_bias[:] = 0.0, 0.0
    problem.a[:] = -4.0
    problem.a[5] = 3e4
    wanted = definition(problem)
    problem.run()
    torch.testing.assert_close(problem.out.double(), wanted[0], rtol=1e-5, atol=1e-5)


def test_bits_do_not_depend_on_threads_or_on_the_batch(restore_threads: None) -> None:
    case = Case((150, 3, 1), key_heads=2, value_heads=6, key_size=32, value_size=32)
    outs = []
    for threads in (1, 2, 5):
        cpu.set_num_threads(threads)
        problem = Problem(case)
        problem.run()
        outs.append(problem.out)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    cpu.set_num_threads(2)
    alone = Problem(case)
    rows = slice(150, 153)
    alone.run(
        x=alone.x[rows],
        a=alone.a[rows],
        b=alone.b[rows],
        out=alone.out[rows],
        query_start_loc=torch.tensor([0, 3], dtype=torch.int32),
        slots=alone.slots[1:2],
        begun=alone.begun[1:2],
    )
    assert torch.equal(alone.out[rows], outs[0][rows])


def test_a_request_that_is_not_a_number_stays_alone() -> None:
    problem = Problem(Case((40, 40, 1)))
    problem.x[50, 3] = torch.nan
    problem.run()
    assert problem.out[50:80].isnan().any()
    assert not problem.out[:50].isnan().any()
    assert not problem.out[80:].isnan().any()


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 24, 128])
def test_the_norm(size: int, dtype: torch.dtype, activation: str, isa: str) -> None:
    x, gate, weight = torch.randn(300, 3, size).to(dtype), (3 * torch.randn(300, 3, size)).to(dtype), torch.randn(size)
    x[0], gate[1] = 0, -200
    got = gated_norm(x.transpose(0, 1), gate.transpose(0, 1), weight, 1e-6, activation)
    x, gate = x.double().transpose(0, 1), gate.double().transpose(0, 1)
    act = gate.sigmoid() * (gate if activation == "silu" else 1)
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double() * act
    torch.testing.assert_close(got.double(), wanted, rtol=2 * ROUNDING[dtype], atol=1e-7)


WRONG: dict[str, tuple[Callable[[Problem], dict[str, Any]], str]] = {
    "x": (lambda p: {"x": p.x[:, :-8]}, r"x must be \[5, 160\]"),
    "a dtype of x": (lambda p: {"x": p.x.double()}, "float64"),
    "out": (lambda p: {"out": p.out.half()}, "out must be"),
    "inputs": (lambda p: {"inputs": p.inputs[:, 1:]}, "inputs must be"),
    "states": (lambda p: {"states": p.states.transpose(2, 3)}, "states must be"),
    "states of strides": (lambda p: {"states": p.states.transpose(0, 1).contiguous().transpose(0, 1)}, "contiguous"),
    "slots": (
        lambda p: {"slots": torch.tensor([0, 4], dtype=torch.int32)},
        r"slots\[1\] is 4, but slots go from 0 to 3",
    ),
    "a slot below 0": (lambda p: {"slots": torch.tensor([-1, 1], dtype=torch.int32)}, r"slots\[0\] is -1"),
    "begun": (lambda p: {"begun": torch.ones(2)}, "begun must be"),
    "starts": (lambda p: {"query_start_loc": torch.tensor([0, 4, 9], dtype=torch.int32)}, "ends at 9"),
    "falling starts": (lambda p: {"query_start_loc": torch.tensor([0, 4, 2], dtype=torch.int32)}, "never decrease"),
    "a first start": (lambda p: {"query_start_loc": torch.tensor([1, 4, 5], dtype=torch.int32)}, "begin with 0, not 1"),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verified": torch.tensor([5, 1]).int()}, r"verified\[0\] is 5, but slots keep states and inputs of 0 to 4"),
        ({"verified": torch.tensor([-1, 1]).int()}, r"verified\[0\] is -1"),
        ({"verified": torch.tensor([1]).int()}, "verified must be"),
        ({"state_slots": torch.tensor([[0, 1], [2, 3]]).int()}, "request 1 computes 4 draft tokens"),
        ({"state_slots": torch.full((2, 4), 10).int()}, r"state_slots\[0\]\[0\] is 10, but slots go from 0 to 9"),
        ({"state_slots": torch.full((2, 4), 1)}, "state_slots must be"),
    ],
)
def test_wrong_drafts_are_named(changes: dict[str, Any], message: str) -> None:
    problem = Problem(Case((1, 4), verified=(2, 1)))
    with pytest.raises(ValueError, match=message):
        problem.run(**changes)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_named(name: str) -> None:
    problem = Problem(Case((1, 4)))
    change, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        problem.run(**change(problem))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_size": 12}, "key_size is 12"),
        ({"value_size": 264}, "value_size is 264"),
        ({"value_heads": 5}, "value_heads is 5"),
        ({"width": 5}, r"weight must be \[160, 2 to 4\]"),
        ({"activation": "gelu"}, "activation is 'gelu'"),
    ],
)
def test_wrong_layers_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem(replace(Case((1,)), **changes)).layer()


def test_a_wrong_norm_is_named() -> None:
    with pytest.raises(ValueError, match="size must be a multiple of 8 up to 256, not 12"):
        gated_norm(torch.zeros(2, 12), torch.zeros(2, 12), torch.zeros(12), 1e-6)
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        gated_norm(torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(8), 1e-6, "gelu")
    with pytest.raises(ValueError, match="gate must be"):
        gated_norm(torch.zeros(2, 8), torch.zeros(3, 8), torch.zeros(8), 1e-6)
