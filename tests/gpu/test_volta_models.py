"""Models and options that a V100's owner serves, on its kernels from PTX, against TRITON_ATTN of the same vLLM.

TRITON_ATTN is what vLLM itself would choose on a V100. The models have random weights and few layers. Prompts are
longer than a step's tokens, so that they are computed in chunks, beside requests that decode.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from fastattention_vllm.demo.haystack import make_haystack
from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DemoModelSpec
from fastattention_vllm.demo.tokenizer import token_id
from tests import reference_models as reference
from tests.gpu.test_engine import GPU, Steps, answers, check
from tests.integration.engine import engine, generate
from tests.integration.test_lora import RANK, make_adapter
from tests.reference_models import decoder_shape, random_prompts, save_random

PEER = "TRITON_ATTN"
MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: reference.llama(8, 2, 128),
    "llama, 6 heads of 256 per KV head": lambda: LlamaConfig(**decoder_shape(12, 2, 256, 3) | {"hidden_size": 192}),
    "qwen2": lambda: reference.qwen2(8, 2, 64),
    "qwen3": lambda: reference.qwen3(8, 2, 128),
    "mistral": reference.mistral,
    "phi3": reference.phi3,
    "gpt-oss": reference.gpt_oss,
    "mixtral": reference.mixtral,
}
WHOLE_STEPS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
OPTIONS: dict[str, dict[str, Any]] = {
    "whole steps as graphs": {"enforce_eager": False, "compilation_config": WHOLE_STEPS},
    "compiled, with graphs": {"enforce_eager": False},
    "prefix caching": {"enable_prefix_caching": True},
    "pages of 32 tokens": {"block_size": 32},
    "one block table": {"disable_hybrid_kv_cache_manager": True},
    "fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "host layers by themselves": {"additional_config": {"fastattention": {"host_kv_layers": "auto"}}},
}  # fmt: skip
NEEDLES = (1_000, 8_000, 32_000, 128_000)


def volta(host_layers: int | str = 0, **changes: Any) -> dict[str, Any]:
    """The settings that select the V100's kernels. ``changes`` may have a section of its own."""
    section = {"volta_kernels": "ptx", "host_kv_layers": host_layers}
    section |= changes.pop("additional_config", {}).get("fastattention", {})
    return changes | {"additional_config": {"fastattention": section}}


def peer(changes: dict[str, Any]) -> dict[str, Any]:
    """The same settings for TRITON_ATTN."""
    return {name: value for name, value in changes.items() if name != "additional_config"} | {"attention_backend": PEER}


@pytest.mark.parametrize("host_layers", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, host_layers: int, tmp_path: Path) -> None:
    model = save_random(MODELS[name](), tmp_path)
    found = answers(model, **volta(host_layers))
    check(found, answers(model, **peer({})))


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_options(changes: dict[str, Any], name: str, tmp_path: Path) -> None:
    if name == "gpt-oss" and ("kv_cache_dtype" in changes or "additional_config" in changes):
        pytest.skip("one model is enough for this option")
    model = save_random(MODELS[name](), tmp_path)
    found = answers(model, **volta(**changes))
    check(found, answers(model, **peer(changes)))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_layouts_of_the_cache(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_random(reference.qwen3(8, 2, 64), tmp_path)
    expected = answers(model, **peer({}))
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    check(answers(model, **volta()), expected)


def test_adapters(tmp_path: Path) -> None:
    base = save_random(reference.llama(4, 2, 64), tmp_path / "base")
    requests: list[LoRARequest | None] = [None]
    for number in (1, 2):
        adapter = tmp_path / f"adapter{number}"
        make_adapter(base, adapter, tmp_path / f"merged{number}", seed=number)
        requests.append(LoRARequest(f"adapter{number}", number, str(adapter)))

    def adapted(**settings: Any) -> list[Steps]:
        lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
        with engine(base, **(GPU | lora | settings)) as llm:
            outputs = generate(llm, random_prompts([300, 20, 700]), max_tokens=24, lora_request=requests)
        completions = [output.outputs[0] for output in outputs]
        return [
            [(token, step[token].logprob) for token, step in zip(found.token_ids, found.logprobs, strict=True)]
            for found in completions
        ]

    check(adapted(**volta()), adapted(**peer({})))


@pytest.mark.parametrize("drafts", [1, 3])
def test_speculation(drafts: int, tmp_path: Path) -> None:
    """One or three guessed tokens: 8 or 16 rows per KV head, for the narrow and the wide decode kernel."""
    model = save_random(reference.qwen3(8, 2, 128), tmp_path)
    prompts = [(prompt * 8)[:600] for prompt in random_prompts((40, 60))]
    method = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3}
    found = []
    for settings in (peer({}), volta(), volta(speculative_config=method), volta(1, speculative_config=method)):
        with engine(model, **(GPU | settings)) as llm:
            found.append([list(output.outputs[0].token_ids) for output in generate(llm, prompts, max_tokens=24)])
    for others in found[1:]:
        agreeing = sum(
            a == b for one, other in zip(found[0], others, strict=True) for a, b in zip(one, other, strict=True)
        )
        assert agreeing >= 40, "of 48; rounding may change a token and all that follow"


@pytest.mark.parametrize("host_layers", [0, 2])
def test_needles_up_to_128k_tokens(host_layers: int, tmp_path: Path) -> None:
    path = build_demo_model(tmp_path / "demo", DemoModelSpec(dtype="float16"))
    prompts = [list(make_haystack(n, {"alpha": "7319"}, depths=[0.3], ask="alpha").token_ids) for n in NEEDLES]
    settings = GPU | {"max_model_len": 131072, "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 4 << 30}
    with engine(path, **(settings | volta(host_layers))) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert [output.outputs[0].token_ids[0] for output in outputs] == [token_id("7319")] * len(NEEDLES)
