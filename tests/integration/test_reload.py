"""Weights that change under a running engine: it answers like one that started with the new weights.

vLLM's ``reload_weights`` loads a checkpoint into the tensors that are there. Those who train a model write into these
tensors themselves, which torch does not count if it is done through ``parameter.data``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig
from vllm import LLM
from vllm.config import set_current_vllm_config
from vllm.lora.request import LoRARequest

from fastattention_vllm.integration import compat, support
from fastattention_vllm.integration.cpu import backend as cpu_backend
from fastattention_vllm.integration.cpu.stand_ins import linear
from fastattention_vllm.integration.cuda import flash, volta, xformers
from fastattention_vllm.integration.refusal import Refusal
from tests import reference_models as reference
from tests.integration.engine import LOGPROB_TOLERANCE, MAX_TOKENS, engine, generate
from tests.integration.test_lora import RANK, make_adapter
from tests.reference_models import random_prompts, save_random

PROMPTS = random_prompts((5, 40, 100))


def llama() -> PretrainedConfig:
    return reference.llama(4, 2, 64)


@dataclass(frozen=True)
class Case:
    config: Callable[[], PretrainedConfig]
    settings: dict[str, Any] = field(default_factory=dict)
    drafts: bool = False
    """A copy of the second model drafts."""


def host_layers(*layers: int) -> dict[str, Any]:
    return {"additional_config": {"fastattention": {"host_kv_layers": list(layers)}}}


BF16 = {"dtype": "bfloat16"}
CASES = {
    "gated delta": Case(reference.qwen3_5),
    "dense": Case(llama),
    "dense, bf16": Case(llama, BF16),
    "experts": Case(reference.qwen3_moe),
    "experts, bf16": Case(reference.qwen3_moe, BF16),
    "gated delta, bf16": Case(reference.qwen3_5, BF16),
    "gated delta, compiled": Case(reference.qwen3_5, {"enforce_eager": False}),
    "gated delta, two ranks": Case(
        reference.qwen3_5, {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    ),
    "gated delta beside experts": Case(reference.qwen3_next),
    "gated delta beside host layers": Case(lambda: reference.qwen3_5(layers=8), host_layers(3)),
    "a draft model": Case(llama, drafts=True),
}

SINKS: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": BF16, "host layers": host_layers(1, 2)}


def save(config: PretrainedConfig, path: Path, seed: int) -> Path:
    """A random model. Its sinks are so large that the answers depend on them."""
    model = save_random(config, path, seed)
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name.endswith("sinks"):
                tensors[name] = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(seed)) + 1
        save_file(tensors, file, {"format": "pt"})
    return model


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.data.clone() for name, parameter in model.named_parameters()}


def check_same(outputs: Sequence[Any], expected: Sequence[Any]) -> None:
    assert tokens(outputs) == tokens(expected)
    for one, other in zip(outputs, expected, strict=True):
        pairs = zip(one.outputs[0].logprobs, other.outputs[0].logprobs, one.outputs[0].token_ids, strict=True)
        assert all(
            abs(step[token].logprob - wanted[token].logprob) < LOGPROB_TOLERANCE for step, wanted, token in pairs
        )


def tokens(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in outputs]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gated delta" else pytest.mark.more) for name in CASES]
)
def test_reloaded_weights_answer_like_those_of_a_new_engine(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if "gated delta" in name and not compat.has_cpu_linear_attention():
        pytest.skip("this vLLM's operator for these layers is not replaced")
    if case.drafts and not support.prepares_drafts():
        pytest.skip("this vLLM's kernels are not replaced")
    first, second = (save(case.config(), tmp_path / str(seed), seed) for seed in (0, 1))
    settings = dict(case.settings)
    if case.drafts:
        settings["speculative_config"] = {"method": "draft_model", "model": str(second), "num_speculative_tokens": 3}
    with engine(second, **settings) as llm:
        expected = generate(llm, PROMPTS)
    with engine(first, **settings) as llm:
        before = generate(llm, PROMPTS)
        here = settings.get("tensor_parallel_size", 1) == 1
        kept = llm.apply_model(copied)[0] if here else {}
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
        check_same(generate(llm, PROMPTS), expected)
        if here and not linear.packed_weights():  # into a packed weight, nothing can be written
            write(llm, kept)
            check_same(generate(llm, PROMPTS), before)
    check_differ(before, expected)


def test_an_incomplete_checkpoint_changes_nothing(tmp_path: Path) -> None:
    """vLLM would answer with what memory held in place of the missing part."""
    first, second = (save_random(llama(), tmp_path / str(seed), seed) for seed in (0, 1))
    tensors = load_file(second / "model.safetensors")
    del tensors[lacking := "model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, second / "model.safetensors", {"format": "pt"})
    with engine(first) as llm:
        before = generate(llm, PROMPTS)
        with pytest.raises(Refusal, match=f"lack the tensor {lacking}"):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
        check_same(generate(llm, PROMPTS), before)


@pytest.mark.more
def test_packed_weights_are_packed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every CPU: those that pack weights pack those of "dense, bf16" above, too."""
    if compat.has_compiled_cpu_ops():
        pytest.skip("this vLLM packs weights itself")
    monkeypatch.setattr(linear, "can_pack", lambda: True)
    monkeypatch.setattr(linear, "_laid_out", torch.clone)
    monkeypatch.setattr(linear, "_linear", torch.nn.functional.linear)
    if linear._library is None:
        linear._define()
    first, second = (save_random(llama(), tmp_path / str(seed), seed) for seed in (0, 1))
    with engine(second, **BF16) as llm:
        expected = generate(llm, PROMPTS)
    with engine(first, **BF16) as llm:
        before, packed = generate(llm, PROMPTS), len(linear.packed_weights())
        assert packed
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
        check_same(generate(llm, PROMPTS), expected)
        assert len(linear.packed_weights()) == packed
        with pytest.raises(RuntimeError, match="size"):  # nothing is written unseen
            llm.apply_model(lambda model: model.model.layers[0].mlp.down_proj.weight.data.copy_(torch.ones(64, 64)))
    check_differ(before, expected)


@pytest.mark.more
@pytest.mark.parametrize("name", SINKS)
def test_sinks_are_written_in_place_or_refused(name: str, tmp_path: Path) -> None:
    """vLLM's reload leaves the sinks and experts of gpt-oss as they were."""
    settings = SINKS[name]
    first, second = (save(reference.gpt_oss(), tmp_path / str(seed), seed) for seed in (0, 1))
    with engine(second, **settings) as llm:
        expected, weights = generate(llm, PROMPTS), llm.apply_model(copied)[0]
    with engine(first, **settings) as llm:
        before = generate(llm, PROMPTS)
        if linear.packed_weights():
            pytest.skip("into a packed weight, nothing can be written")
        with pytest.raises(Refusal, match=r"would not replace all weights of GptOssForCausalLM; start the server"):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
        check_same(generate(llm, PROMPTS), before)
        write(llm, weights)
        check_same(generate(llm, PROMPTS), expected)
    check_differ(before, expected)


@pytest.mark.parametrize(
    "impl",
    [
        cpu_backend.FastAttentionImpl,
        flash.FastAttentionFlashImpl,
        volta.FastAttentionVoltaImpl,
        xformers.FastAttentionXformersImpl,
    ],
)
def test_attention_layers_need_no_configuration_when_weights_are_loaded_again(impl: Any) -> None:
    """Up to 0.23, vLLM's workers set none then, and a layer that asks for it ends the reload in the middle."""
    with set_current_vllm_config(None):  # type: ignore[arg-type]
        impl.process_weights_after_loading(object.__new__(impl), torch.float16)


def check_differ(some: Sequence[Any], others: Sequence[Any]) -> None:
    assert all(one != other for one, other in zip(tokens(some), tokens(others), strict=True))


def write(llm: LLM, weights: dict[str, torch.Tensor]) -> None:
    """In place, through ``data``."""

    def copy(model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(weights[name])

    llm.apply_model(copy)


@pytest.mark.more
def test_a_reloaded_model_forgets_its_adapters(tmp_path: Path) -> None:
    """The base model's weights and the adapter's files are replaced."""
    bases = [save_random(llama(), tmp_path / f"base{seed}", seed) for seed in (0, 1)]
    for seed, base in enumerate(bases):
        make_adapter(base, tmp_path / f"adapter{seed}", tmp_path / f"merged{seed}", seed + 7)
    settings = {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK}
    first, second = (LoRARequest("adapter", 1, str(tmp_path / f"adapter{seed}")) for seed in (0, 1))
    with engine(bases[1], **settings) as llm:
        expected = generate(llm, PROMPTS, lora_request=second), generate(llm, PROMPTS)
    with engine(bases[0], **settings) as llm:
        before = generate(llm, PROMPTS, lora_request=first)
        shutil.copytree(tmp_path / "adapter1", tmp_path / "adapter0", dirs_exist_ok=True)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(bases[1])})
        check_same(generate(llm, PROMPTS, lora_request=first), expected[0])
        check_same(generate(llm, PROMPTS), expected[1])
    assert tokens(before) != tokens(expected[0])
    assert len(tokens(before)[0]) == MAX_TOKENS
