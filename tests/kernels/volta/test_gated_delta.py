"""The gated delta rule's kernels against float64: sources on the emulator, machine code on the simulated V100."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.volta import gated_delta_problems as kernels
from kernels.volta.gated_delta_problems import Array, GatedDelta
from kernels.volta.gated_delta_variants import CHUNK, SCANS, SIZE, GatedDeltaVariant
from kernels.volta.manifest import SOURCES, structures
from tests.attention.volta.delta_rule import Problem, definition_with_changes

SMALL, LARGE = SCANS
PER_PROCESS = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def problem(lengths: list[int], key_heads: int = 1, shared: int = 1, decay: float = 0.3, seed: int = 0) -> Problem:
    return Problem(lengths, (key_heads, key_heads * shared, SIZE, SIZE), decay, torch.float16, seed)


def given_to_kernels(of: Problem, normalise: bool = True) -> kernels.Problem:
    arrays = {name: getattr(of, name).numpy() for name in ("q", "k", "v", "g", "beta", "states")}
    return kernels.Problem(**arrays, starts=of.starts, normalise=normalise)


def run(
    of: Problem, scan: GatedDeltaVariant = LARGE, normalise: bool = True, machines: Any = kernels.emulated
) -> tuple[Array, Array]:
    return kernels.Launch(given_to_kernels(of, normalise), scan, machines).run()


def check(of: Problem, found: tuple[Array, Array], normalise: bool = True) -> None:
    """Operands in two parts have 22 bits, down to the smallest numbers of fp16. fp16 rounds the output, and the two
    factors of the products of a chunk's own tokens in it."""
    out, states, changes = (x.numpy() for x in definition_with_changes(of, normalise))
    largest = max(numpy.abs(states).max(), numpy.abs(of.states.numpy()).max(), numpy.abs(changes).max(initial=0))
    of_parts = 2**-19 * largest + 2**-24
    assert numpy.abs(found[1] - states).max() <= of_parts
    tolerance = 2**-11 * numpy.abs(out) + 2**-10 * sums_within_chunks(of, changes, normalise) + of_parts
    assert (numpy.abs(found[0] - out) <= tolerance).all()


def sums_within_chunks(of: Problem, changes: Array, normalise: bool) -> Array:
    """The sizes of what a chunk's tokens add to its output."""
    q, k = (x.double().numpy() for x in (of.q, of.k))
    if normalise:
        q, k = (x / numpy.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    shared = changes.shape[1] // k.shape[1]
    sums = numpy.zeros_like(changes)
    for first, end in pairwise(of.starts):
        for at in range(first, end, CHUNK):
            rows = slice(at, min(at + CHUNK, end))
            c = of.g[rows].double().numpy().cumsum(0)
            weights = numpy.abs(numpy.einsum("ihd,jhd->hij", q[rows], k[rows])).repeat(shared, 0)
            weights *= numpy.exp(numpy.minimum(c[:, None] - c[None], 0)).transpose(2, 0, 1)
            sums[rows] = numpy.einsum("hij,jhv->ihv", numpy.tril(weights), numpy.abs(changes[rows])) * SIZE**-0.5
    return sums


@PER_PROCESS
@given(
    lengths=st.lists(st.integers(0, 100), min_size=1, max_size=2),
    key_heads=st.integers(1, 2),
    shared=st.integers(1, 2),
    decay=st.sampled_from([0.0, 0.1, 3.0, 80.0]),
    scan=st.sampled_from(SCANS),
    normalise=st.booleans(),
    seed=st.integers(0, 99),
)
def test_drawn_problems(
    lengths: list[int], key_heads: int, shared: int, decay: float, scan: GatedDeltaVariant, normalise: bool, seed: int
) -> None:
    drawn = problem(lengths, key_heads, shared, decay, seed)
    if not normalise:  # the rule only stays finite with keys of at most this length
        drawn.q, drawn.k = ((x.float() / x.float().norm(dim=-1, keepdim=True)).half() for x in (drawn.q, drawn.k))
    check(drawn, run(drawn, scan, normalise), normalise)


def test_borders_of_blocks() -> None:
    """Of chunks with up to 16 tokens, one block is computed; of others, all."""
    one = problem([1, 16, 17, 80])
    check(one, run(one))


def test_equal_keys_that_are_replaced_each_time() -> None:
    """Powers of the triangular matrix have entries up to 1e17 here. Those of its inverse are at most 1."""
    one = problem([100], decay=0.0)
    one.k[:] = one.k[0]
    one.beta.fill_(1.0)
    launch = kernels.Launch(given_to_kernels(one), LARGE, kernels.emulated)
    check(one, launch.run())
    assert numpy.abs(launch.matrices[:, :, :2]).max() <= 1


def test_small_decays_after_large_ones() -> None:
    """Sums of logarithms are thousands here, and their differences below 1."""
    one = problem([64])
    one.g[:32] = -100.0 * torch.rand(32, 1)
    one.g[32:] = -0.01 * torch.rand(32, 1)
    check(one, run(one))


@pytest.mark.parametrize("length", [2.0**-12, 1e-3, 3000.0])
def test_keys_and_queries_of_any_length(length: float) -> None:
    one = problem([70])
    one.q, one.k = ((x * length).half() for x in (one.q.float(), one.k.float()))
    check(one, run(one))


@pytest.mark.parametrize("size", [1e-3, 1e4])
def test_values_and_states_of_any_size(size: float) -> None:
    """Without larger decays, which would hide errors of the first chunk in the state."""
    one = problem([70], decay=0.01)
    one.v, one.states = (one.v.float() * size).half(), one.states * size
    check(one, run(one))


@pytest.mark.parametrize(
    ("part", "number"),
    [
        ("q", numpy.nan),
        ("k", numpy.nan),
        ("k", numpy.inf),
        ("v", numpy.nan),
        ("v", numpy.inf),
        ("g", numpy.nan),
        ("beta", numpy.nan),
        ("states", numpy.nan),
    ],
)
def test_nan_and_infinity_reach_their_request_and_no_other(part: str, number: float) -> None:
    """All that follows the token in its request, or the token alone for a query. Earlier tokens of its block of 16 may
    become NaN too, those before that block do not."""
    of, sound = problem([70, 90, 20]), problem([70, 90, 20])
    first, token, end = 70, 70 + 37, 160
    changed = getattr(of, part)
    if part == "states":
        changed[1, 0, 3, 5], token = number, first
    else:
        changed[(token, 0, 5) if changed.dim() == 3 else (token, 0)] = number
    (out, states), (expected, expected_states) = run(of), run(sound)
    reached = ~numpy.isfinite(out).all(-1)
    assert reached[token].all()
    assert reached[token:end].all() or part == "q"
    assert numpy.isfinite(states[1]).all() == (part == "q")
    before = first + (token - first) // 16 * 16
    for rows in (slice(0, before), slice(end, None)):
        assert numpy.array_equal(out[rows], expected[rows])
    for request in (0, 2):
        assert numpy.array_equal(states[request], expected_states[request])


@pytest.mark.parametrize("scan", SCANS, ids=lambda one: one.name)
def test_bits_depend_on_the_request_alone(scan: GatedDeltaVariant) -> None:
    """Nor on the order of warps, which differs between CTAs."""
    several = problem([9, 70, 5])
    out, states = run(several, scan)
    alone = problem([70])
    for name in ("q", "k", "v", "g", "beta"):
        setattr(alone, name, getattr(several, name)[9:79].clone())
    alone.states = several.states[1:2].clone()
    found, state = run(alone, scan)
    assert numpy.array_equal(out[9:79].view("u2"), found.view("u2"))
    assert numpy.array_equal(states[1:2].view("u4"), state.view("u4"))


def test_parts_of_a_prompt_continue_it_bit_for_bit() -> None:
    whole = problem([150])
    out, states = run(whole)
    state = whole.states
    for first, end in pairwise([0, 64, 150]):
        part = problem([end - first])
        for name in ("q", "k", "v", "g", "beta"):
            setattr(part, name, getattr(whole, name)[first:end].clone())
        part.states = state
        found, after = run(part)
        assert numpy.array_equal(out[first:end].view("u2"), found.view("u2"))
        state = torch.from_numpy(after)
    assert numpy.array_equal(states.view("u4"), state.numpy().view("u4"))


@pytest.mark.more
@pytest.mark.parametrize("scan", SCANS, ids=lambda one: one.name)
def test_the_simulated_machine_computes_the_same(scan: GatedDeltaVariant) -> None:
    """The machine code that is shipped. The second chunk has an end."""
    one = problem([70])
    check(one, run(one, scan, machines=kernels.simulated))


def test_the_structure_is_the_headers() -> None:
    header = structures((SOURCES / "gated_delta.h").read_text())["GatedDelta"]
    for name, *_ in GatedDelta._fields_:
        field = getattr(GatedDelta, name)
        assert header.pop(name) == (field.offset, field.size)
    assert [*header] == [""]
