"""LoRA: each request gets the answers of its adapter, equal to Hugging Face with that adapter merged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.integration.engine import MAX_TOKENS, check, engine, generate
from tests.reference_models import Answer, hugging_face_answers, llama, random_prompts, save_random

RANK, ALPHA = 8, 16
SPREAD = 0.14
"""Size of an adapter's entries. It makes answers differ clearly from the base model's. Twice the size would amplify
rounding so much that two fp32 computations differ by 1e-4; Hugging Face's own result is half of that from float64.
"""
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "lm_head")


def make_adapter(base: Path, adapter: Path, merged: Path, seed: int) -> None:
    """A random adapter in PEFT's file format, and the model with it merged into the weights."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(TARGETS):
            down = SPREAD * torch.randn(RANK, module.in_features, generator=generator)
            up = SPREAD * torch.randn(module.out_features, RANK, generator=generator)
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
            module.weight.data += ALPHA / RANK * up @ down
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS, "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    model.save_pretrained(merged)


def with_adapters(
    base: Path, prompts: Sequence[list[int]], folder: Path
) -> tuple[list[LoRARequest | None], list[Answer]]:
    """For three prompts: none and two random adapters of ``base``, made in ``folder``, and the answers with them."""
    requests: list[LoRARequest | None] = [None]
    expected = hugging_face_answers(base, prompts[:1], MAX_TOKENS)
    for number in (1, 2):
        adapter, merged = folder / f"adapter{number}", folder / f"merged{number}"
        make_adapter(base, adapter, merged, seed=number)
        requests.append(LoRARequest(f"adapter{number}", number, str(adapter)))
        expected += hugging_face_answers(merged, prompts[number : number + 1], MAX_TOKENS)
    return requests, expected


@pytest.mark.parametrize("host_layers", [0, 2], ids=["device layers", "host layers"])
def test_adapters_equal_hugging_face(tmp_path: Path, host_layers: int) -> None:
    options = {"fastattention": {"host_kv_layers": host_layers}}
    base = save_random(llama(4, 2, 64), tmp_path / "base")
    prompts = random_prompts([3, 20, 70])
    requests, expected = with_adapters(base, prompts, tmp_path)
    with engine(base, enable_lora=True, max_loras=2, max_lora_rank=RANK, additional_config=options) as llm:
        check(generate(llm, prompts, lora_request=requests), expected)
        with pytest.raises(ValueError, match="prompt_logprobs=1"):
            llm.generate([{"prompt_token_ids": prompts[0]}], SamplingParams(prompt_logprobs=1), use_tqdm=False)
        check(generate(llm, prompts[:1]), expected[:1])


def test_only_engines_with_adapters_refuse_prompt_logprobs(tmp_path: Path) -> None:
    base = save_random(llama(1, 1, 64), tmp_path / "base")
    request, params = {"prompt_token_ids": [3, 1, 4]}, SamplingParams(prompt_logprobs=1, max_tokens=1)
    with (
        engine(base, enable_lora=True, max_lora_rank=RANK) as llm,
        pytest.raises(ValueError, match="prompt_logprobs=1"),
    ):
        llm.generate([request], params, use_tqdm=False)
    with engine(base) as llm:
        assert len(llm.generate([request], params, use_tqdm=False)[0].prompt_logprobs) == 3
