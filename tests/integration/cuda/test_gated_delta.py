"""Gated DeltaNet layers of vLLM get this package's operation for prompts, with vLLM's own arguments."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import ChunkGatedDeltaRule

from fastattention_vllm.attention.volta import delta_kernels
from fastattention_vllm.attention.volta.gated_delta import Schedule, gated_delta_rule
from fastattention_vllm.integration.cuda import gated_delta
from fastattention_vllm.integration.cuda.gated_delta import GatedDeltaRule, install

STARTS = [0, 40, 41, 141]
KEY_HEADS, VALUE_HEADS, KEY, VALUE = 2, 4, 16, 24


def config(*layers: Any) -> Any:
    context = {str(index): layer for index, layer in enumerate(layers)}
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))


def layer(**more: Any) -> Any:
    return SimpleNamespace(chunk_gated_delta_rule=torch.nn.Identity(), **more)


def arguments(seed: int = 0, starts: list[int] = STARTS) -> dict[str, Any]:
    generator, tokens = torch.Generator().manual_seed(seed), starts[-1]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "q": draw(1, tokens, KEY_HEADS, KEY).half(),
        "k": draw(1, tokens, KEY_HEADS, KEY).half(),
        "v": draw(1, tokens, VALUE_HEADS, VALUE).half(),
        "g": -draw(1, tokens, VALUE_HEADS).abs(),
        "beta": draw(1, tokens, VALUE_HEADS).sigmoid(),
        "initial_state": draw(len(starts) - 1, VALUE_HEADS, VALUE, KEY),
        "output_final_state": True,
        "cu_seqlens": torch.tensor(starts, dtype=torch.int32),
    }


def expected(given: dict[str, Any], normalise: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    schedule = Schedule(given["cu_seqlens"].tolist(), 1 << 20, torch.device("cpu"))
    tensors = (given[name][0] for name in ("q", "k", "v", "g", "beta"))
    return gated_delta_rule(*tensors, given["initial_state"], schedule, normalise=normalise)


def test_it_has_the_arguments_and_results_of_vllms_operation() -> None:
    theirs = inspect.signature(ChunkGatedDeltaRule.forward_native).parameters
    given = arguments()
    known = set(theirs) & set(inspect.signature(GatedDeltaRule.forward).parameters)
    assert known >= {*given, "use_qk_l2norm_in_kernel", "core_attn_out"}
    rest = dict.fromkeys(set(theirs) - known - {"self"})
    out, states = GatedDeltaRule()(**given, **rest, use_qk_l2norm_in_kernel=True)
    wanted_out, wanted_states = expected(given)
    assert torch.equal(out, wanted_out[None])
    assert torch.equal(states, wanted_states)
    assert (out.shape, out.dtype, states.dtype) == (given["v"].shape, torch.float16, torch.float32)


def test_normalised_inputs_and_a_given_output() -> None:
    given = arguments() | {"output_final_state": False}
    into = torch.zeros(150, VALUE_HEADS, VALUE, dtype=torch.float16)
    out, states = GatedDeltaRule()(**given, use_qk_l2norm_in_kernel=False, core_attn_out=into)
    assert states is None
    assert torch.equal(out[0], expected(given, normalise=False)[0])
    assert torch.equal(into[:141], out[0])
    assert not into[141:].any()


def test_lengths_are_read_once_for_each_step_and_group(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def schedule(starts: list[int], *more: Any) -> Schedule:
        made.append(starts)
        return Schedule(starts, *more)

    monkeypatch.setattr(gated_delta, "Schedule", schedule)
    operation, groups = GatedDeltaRule(), [arguments(), arguments(1, [0, 7])]
    for _ in range(3):
        for given in groups:
            operation(**given)
    assert made == [STARTS, [0, 7]]
    given = groups[0] | {"cu_seqlens": torch.tensor([0, 41, 100, 141])}
    out, _ = operation(**given)
    assert torch.equal(out[0], expected(given)[0])


def test_schedules_of_past_steps_are_forgotten() -> None:
    operation = GatedDeltaRule()
    for seed in range(3):
        operation(**arguments(seed))
    assert operation.schedules.known == {}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Loading the kernels only appends to this list."""
    found: list[bool] = []
    monkeypatch.setattr(delta_kernels, "load", lambda: found.append(True))
    return found


def test_heads_of_128_are_computed_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments()
    given |= {name: torch.cat([given[name]] * 8, -1)[..., :128] for name in ("q", "k")}
    calls: list[tuple[list[int], bool]] = []

    def rule(*tensors: torch.Tensor, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        *_, plan = tensors
        calls.append((plan.segments[0].pieces[:, 3].tolist(), normalise))
        return tensors[2], tensors[5]

    monkeypatch.setattr(delta_kernels, "gated_delta_rule", rule)
    wide = given | {"v": torch.cat([given["v"]] * 6, -1)[..., :128]}
    wide["initial_state"] = torch.zeros(3, VALUE_HEADS, 128, 128)
    operation = GatedDeltaRule()
    out, states = operation(**wide)
    assert torch.equal(out, wide["v"])
    assert states is wide["initial_state"]
    assert calls == [([2, 0, 1], True)]
    given["initial_state"] = torch.zeros(3, VALUE_HEADS, VALUE, 128)
    assert torch.equal(operation(**given)[0][0], expected(given)[0])
    assert len(calls) == 1


def test_all_layers_share_the_operation(loads: list[bool]) -> None:
    found = [layer(), SimpleNamespace(), layer(gdn_prefill_backend="triton")]
    install(config(*found))
    operation = found[0].chunk_gated_delta_rule
    assert isinstance(operation, GatedDeltaRule)
    assert loads == [True]
    assert found[2].chunk_gated_delta_rule is operation
    assert not hasattr(found[1], "chunk_gated_delta_rule")
    install(config(*found))
    assert found[0].chunk_gated_delta_rule is operation


def test_other_kernels_and_other_models_stay(loads: list[bool]) -> None:
    flash = layer(gdn_prefill_backend="flashinfer")
    before = flash.chunk_gated_delta_rule
    install(config(flash))
    install(config(SimpleNamespace()))
    assert flash.chunk_gated_delta_rule is before
    assert not loads


def test_memory_is_reserved_in_the_first_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta, "WORKSPACE_BYTES", 12345)
    operation, given = GatedDeltaRule(), arguments()
    sizes = []
    for _ in range(2):
        with torch.profiler.profile(profile_memory=True, record_shapes=True) as profile:
            operation(**given)
        found = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
        sizes.append([event.nbytes() for event in found].count(12345))
    assert sizes == [1, 0]
