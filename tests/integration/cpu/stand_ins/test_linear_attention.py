"""The operator of Gated DeltaNet layers: which states it reads and writes. tests/integration compares whole models."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import forward_context

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.cpu.stand_ins import linear_attention, state_copies
from tests.attention.cpu.delta_oracle import Case, Problem, definition

KEY_HEADS, VALUE_HEADS, SIZE, WIDTH, SLOTS = 2, 4, 8, 4, 6
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * SIZE

pytestmark = pytest.mark.skipif(not compat.has_cpu_linear_attention(), reason="nothing is replaced in this vLLM")


class Metadata(SimpleNamespace):
    """Weak references to it are possible, as to vLLM's."""


def layer(dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(3)
    return SimpleNamespace(
        prefix="model.layers.0.linear_attn",
        tp_size=1,
        num_k_heads=KEY_HEADS,
        num_v_heads=VALUE_HEADS,
        key_dim=KEY_HEADS * SIZE,
        value_dim=VALUE_HEADS * SIZE,
        activation="silu",
        conv1d=SimpleNamespace(weight=torch.randn(CHANNELS, 1, WIDTH, generator=generator), bias=None),
        A_log=torch.rand(VALUE_HEADS, generator=generator),
        dt_bias=torch.rand(VALUE_HEADS, generator=generator),
        # What other requests left in the slots.
        kv_cache=(
            torch.full((SLOTS, WIDTH - 1, CHANNELS), 7.0, dtype=dtype),
            torch.full((SLOTS, VALUE_HEADS, SIZE, SIZE), 7.0),
        ),
    )


def run(
    one: Any,
    monkeypatch: pytest.MonkeyPatch,
    x: Any,
    b: Any,
    a: Any,
    steps: list[tuple[int, int, bool]],
    decodes: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """``steps``: of each request its tokens, slot, and whether it has begun. ``decodes``: all that have, if absent."""
    decodes = sum(begun for _, _, begun in steps) if decodes is None else decodes
    metadata = Metadata(
        spec_sequence_masks=None,
        num_actual_tokens=len(x),
        num_decodes=decodes,
        num_prefills=len(steps) - decodes,
        non_spec_state_indices_tensor=torch.tensor([slot for _, slot, _ in steps], dtype=torch.int32),
        non_spec_query_start_loc=torch.tensor([0, *(tokens for tokens, _, _ in steps)]).cumsum(0),
        has_initial_state=torch.tensor([begun for _, _, begun in steps]),
    )
    context = SimpleNamespace(no_compile_layers={one.prefix: one}, attn_metadata={one.prefix: metadata})
    monkeypatch.setattr(forward_context, "get_forward_context", lambda: context)
    out = torch.zeros(len(x), VALUE_HEADS, SIZE, dtype=dtype)
    linear_attention._operator(x, b, a, out, one.prefix)
    return out


def test_decoding_continues_each_prompt_in_its_own_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of two prompts is decoded; the answers are those of the prompts as a whole."""
    generator = torch.Generator().manual_seed(4)
    x, b, a = (torch.randn(9, width, generator=generator) for width in (CHANNELS, VALUE_HEADS, VALUE_HEADS))
    whole, first, second = layer(), slice(0, 4), slice(4, 9)
    expected = run(whole, monkeypatch, x, b, a, [(4, 2, False), (5, 5, False)])
    assert expected[first].any()
    assert expected[second].any()

    parts, all_but_last, last = layer(), [0, 1, 2, 4, 5, 6, 7], [8, 3]
    run(parts, monkeypatch, x[all_but_last], b[all_but_last], a[all_but_last], [(3, 2, False), (4, 5, False)])
    decoded = run(parts, monkeypatch, x[last], b[last], a[last], [(1, 5, True), (1, 2, True)])
    torch.testing.assert_close(decoded, expected[last])
    for got, wanted in zip(parts.kv_cache, whole.kv_cache, strict=True):
        torch.testing.assert_close(got, wanted)
        assert (got[[0, 1, 3, 4]] == 7).all(), "the other slots are not touched"


def test_a_step_equals_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of one request beside the prompts of two, of which one is new, with 16-bit inputs."""
    sizes = {"key_heads": KEY_HEADS, "value_heads": VALUE_HEADS, "key_size": SIZE, "value_size": SIZE}
    problem = Problem(Case((1, 70, 5), begun=(True, True, False), **sizes, dtype=torch.bfloat16))
    one = layer()
    one.conv1d.weight, one.A_log, one.dt_bias = problem.weight[:, None], problem.a_log, problem.dt_bias
    one.kv_cache = problem.inputs, problem.states
    wanted = definition(problem)
    slots = problem.slots.tolist()
    steps = [(1, slots[0], True), (70, slots[1], True), (5, slots[2], False)]
    out = run(one, monkeypatch, problem.x, problem.b, problem.a, steps, decodes=1, dtype=torch.bfloat16)
    torch.testing.assert_close(out.double(), wanted[0], rtol=2**-8, atol=2e-5)
    torch.testing.assert_close(problem.states.double(), wanted[2], rtol=2e-5, atol=2e-5, equal_nan=True)


WRITES: dict[str, Callable[[Any, str, torch.Tensor], object]] = {
    "in place": lambda module, name, new: getattr(module, name).copy_(new),
    "unseen by torch": lambda module, name, new: getattr(module, name).data.copy_(new),
    "other memory": lambda module, name, new: getattr(module, name).set_(new.clone()),
    "another tensor": lambda module, name, new: setattr(module, name, new.clone()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("name", ["weight", "bias", "A_log", "dt_bias"])
def test_parameters_may_be_written_between_steps(
    name: str, write: Callable[[Any, str, torch.Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when weights are loaded again, by vLLM or by whoever trains the model."""
    generator = torch.Generator().manual_seed(4)
    x, b, a = (torch.randn(6, width, generator=generator) for width in (CHANNELS, VALUE_HEADS, VALUE_HEADS))
    written, fresh = layer(), layer()
    for one in (written, fresh):
        one.conv1d.bias = torch.zeros(CHANNELS)
    before = run(written, monkeypatch, x, b, a, [(6, 2, False)])
    module, of_fresh = (one.conv1d if name in ("weight", "bias") else one for one in (written, fresh))
    new = torch.rand(getattr(module, name).shape, generator=generator)
    write(module, name, new)
    setattr(of_fresh, name, new)
    expected = run(fresh, monkeypatch, x, b, a, [(6, 2, False)])
    assert not torch.equal(before, expected)
    assert torch.equal(run(written, monkeypatch, x, b, a, [(6, 2, False)]), expected)


def test_nothing_is_converted_again_for_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN included, which does not equal itself."""
    one = layer()
    one.dt_bias[0] = torch.nan
    kernels = linear_attention._kernels(one)
    one.A_log = one.A_log.clone()
    assert linear_attention._kernels(one) is kernels
    one.dt_bias[0] = -torch.nan
    assert linear_attention._kernels(one) is not kernels


def test_profiling_runs_compute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = layer()
    context = SimpleNamespace(no_compile_layers={one.prefix: one}, attn_metadata=None)
    monkeypatch.setattr(forward_context, "get_forward_context", lambda: context)
    out = torch.full((3, VALUE_HEADS, SIZE), 5.0)
    linear_attention._operator(torch.empty(3, CHANNELS), None, None, out, one.prefix)
    assert (out == 5).all()


def test_packed_weights_are_a_copy_of_the_shape_that_vllm_keeps() -> None:
    weight = torch.randn(6, 4)
    packed = linear_attention.pack_convolution(weight)
    assert packed.shape == (6, 1, 4)
    assert torch.equal(packed.view(6, 4), weight)
    assert packed.data_ptr() != weight.data_ptr()


def test_states_are_copied_by_address() -> None:
    source, target = torch.arange(12, dtype=torch.float32), torch.zeros(12)
    addresses = torch.tensor([source.data_ptr() + 8, source.data_ptr()])
    targets = torch.tensor([target.data_ptr(), target.data_ptr() + 40])
    state_copies.copy_states(addresses, targets, torch.tensor([12, 8], dtype=torch.int32), BLOCK_SIZE=1024)
    assert target.tolist() == [2, 3, 4] + [0] * 7 + [0, 1]
