"""The gated delta rule by torch's operators, against its definition in float64 and against Hugging Face."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from fastattention_vllm.attention.volta.gated_delta import (
    BLOCK,
    CHUNK,
    WORKSPACE_BYTES,
    Schedule,
    tokens_at_once,
)
from tests.attention.volta.delta_rule import CPU, Problem, definition


def check(problem: Problem, at_once: int = 1 << 20, tolerance: float = 2e-5, normalise: bool = True) -> None:
    out, states = problem.run(at_once, normalise)
    expected_out, expected_states = definition(problem, normalise)
    torch.testing.assert_close(out.double(), expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(states.double(), expected_states, rtol=tolerance, atol=tolerance)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    key_heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    key_size=st.sampled_from([1, 8, 33]),
    value_size=st.sampled_from([1, 16, 40]),
    decay=st.sampled_from([0.0, 0.1, 3.0, 80.0]),
    at_once=st.sampled_from([1, CHUNK, 3 * CHUNK, 1 << 20]),
    seed=st.integers(0, 100),
)
def test_any_batch(
    lengths: list[int],
    key_heads: int,
    shared: int,
    key_size: int,
    value_size: int,
    decay: float,
    at_once: int,
    seed: int,
) -> None:
    sizes = (key_heads, key_heads * shared, key_size, value_size)
    check(Problem(lengths, sizes, decay, seed=seed), at_once)


def test_the_attention_shape_of_qwen3_5() -> None:
    check(Problem([130], (4, 12, 128, 128), decay=0.1))


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK])
def test_borders_of_chunks(length: int) -> None:
    check(Problem([length]))


def test_equal_keys_that_are_replaced_each_time() -> None:
    """The powers of the triangular matrix have entries up to 1e17 here, so an inverse by powers would be wrong."""
    problem = Problem([200], decay=0.0)
    problem.k[:] = problem.k[0]
    problem.beta.fill_(1.0)
    check(problem)


def test_fp16_is_rounded_once() -> None:
    problem = Problem([100], dtype=torch.float16)
    out, _ = problem.run()
    expected, _ = definition(problem)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.double(), expected, rtol=2**-11, atol=1e-6)


def test_queries_and_keys_that_are_normalised_already() -> None:
    problem = Problem([70, 20])
    problem.q, problem.k = (x / x.norm(dim=-1, keepdim=True) for x in (problem.q, problem.k))
    check(problem, normalise=False)


def test_parts_of_a_prompt_continue_it() -> None:
    whole = Problem([150])
    out, states = whole.run()
    found, state = [], whole.states
    for first, end in pairwise([0, 64, 65, 81, 150]):
        part = Problem([end - first])
        for name in ("q", "k", "v", "g", "beta"):
            setattr(part, name, getattr(whole, name)[first:end])
        part.states = state
        piece, state = part.run()
        found.append(piece)
    torch.testing.assert_close(torch.cat(found), out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, states, rtol=1e-5, atol=1e-6)


def test_it_is_hugging_faces() -> None:
    problem = Problem([0, 1, 16, 17, 64, 200])
    out, states = problem.run(3 * CHUNK)
    shared = problem.v.shape[1] // problem.k.shape[1]
    for request, (first, end) in enumerate(pairwise(problem.starts)):
        if first == end:
            assert torch.equal(states[request], problem.states[request])
            continue
        rows = slice(first, end)
        theirs, state = torch_chunk_gated_delta_rule(
            problem.q[None, rows].repeat_interleave(shared, 2),
            problem.k[None, rows].repeat_interleave(shared, 2),
            problem.v[None, rows],
            problem.g[None, rows],
            problem.beta[None, rows],
            initial_state=problem.states[request : request + 1].transpose(2, 3),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(out[rows], theirs[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(states[request], state[0].transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_equal_inputs_give_equal_bits() -> None:
    first, second = (Problem([100, 7, 300]).run(2 * CHUNK) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_the_states_that_were_given_stay() -> None:
    problem = Problem([70])
    before = problem.states.clone()
    problem.run()
    assert torch.equal(problem.states, before)


@pytest.mark.parametrize("at_once", [1, 5 * CHUNK, 1 << 20])
def test_each_token_is_scheduled_once(at_once: int) -> None:
    starts = [0, 3, 3, 200, 201, 600, 616]
    schedule = Schedule(starts, at_once, CPU)
    tokens = torch.cat([segment.tokens for segment in schedule.segments])
    assert tokens[tokens < 616].sort().values.tolist() == list(range(616))
    assert all(len(segment.tokens) <= max(at_once, CHUNK) for segment in schedule.segments)
    assert {segment.chunk for segment in schedule.segments} == {BLOCK, CHUNK}


def test_many_single_tokens_take_small_chunks() -> None:
    schedule = Schedule(list(range(101)), 1 << 20, CPU)
    assert [(segment.chunk, segment.alive) for segment in schedule.segments] == [(BLOCK, (100,))]


@pytest.mark.parametrize("value_heads", [12, 24, 48])
def test_the_workspace_is_not_exceeded(value_heads: int) -> None:
    """Of the shape of Qwen3.5-27B on 4, 2 and 1 GPUs, as counted by torch's profiler."""
    tokens = tokens_at_once(value_heads, 128, 128)
    problem = Problem([tokens], (value_heads // 3, value_heads, 128, 128))
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        problem.run(tokens)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    peak = held = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    # The output and the states are the caller's.
    theirs = problem.v.nbytes + 3 * problem.states.nbytes
    assert WORKSPACE_BYTES // 3 < peak - theirs <= WORKSPACE_BYTES


def test_shapes_that_do_not_fit() -> None:
    problem = Problem([20])
    problem.beta = problem.beta[:, :3]
    with pytest.raises(ValueError, match=r"^beta has shape \[20, 3\], but must have \[20, 4\].$"):
        problem.run()
    problem = Problem([20])
    problem.starts = [0, 19]
    with pytest.raises(ValueError, match="20 tokens with 2 key heads and 4 value heads do not fit 19"):
        problem.run()
