"""Models and options that a V100's owner serves, on its kernels from PTX, against Hugging Face in fp32.

fp16 rounds every step of a model, so no single tolerance fits all models. TRITON_ATTN of the same vLLM, which vLLM
itself would choose on a V100, computes the same answers: the kernels may be at most twice as far from fp32 as it is.
The models have random weights and few layers. Prompts are longer than a step's tokens, so they are computed in chunks,
beside requests that decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PretrainedConfig
from vllm import SamplingParams

from fastattention_vllm.demo.haystack import make_haystack
from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DemoModelSpec
from fastattention_vllm.demo.tokenizer import token_id
from tests import reference_models as reference
from tests.gpu.test_engine import ALLOWED, GPU, LENGTHS, Steps
from tests.integration.engine import MAX_TOKENS, NGRAM, check_drafts, engine, generate
from tests.integration.test_lora import RANK, with_adapters
from tests.reference_models import (
    Answer,
    decoder_shape,
    hugging_face_answers,
    random_prompts,
    repeating_prompts,
    save_random,
    save_repetitive,
)

Prompts = Sequence[list[int]]
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
}
NEEDLES = (1_000, 8_000, 32_000, 128_000)


def volta(host_layers: int | str = 0) -> dict[str, Any]:
    """The settings that select the V100's kernels."""
    return {"additional_config": {"fastattention": {"volta_kernels": "ptx", "host_kv_layers": host_layers}}}


def saved(config: PretrainedConfig, path: Path, save: Callable[..., Path] = save_random) -> Path:
    """A random model whose weights are fp16 numbers."""
    model = save(config, path)
    for file in model.glob("*.safetensors"):
        save_file({name: w.half().float() for name, w in load_file(file).items()}, file, metadata={"format": "pt"})
    return model


def peaked(model: Path) -> Path:
    """Make each token favour one next token, so that rounding decides between two good tokens much less often.

    Compilation moves a random gpt-oss far enough to leave the reference's tokens in the first steps otherwise.
    """
    for file in model.glob("*.safetensors"):
        weights = load_file(file)
        favoured = weights["model.embed_tokens.weight"].roll(1, 0)
        weights["lm_head.weight"] = (weights["lm_head.weight"] + 3 * favoured).half().float()
        save_file(weights, file, metadata={"format": "pt"})
    return model


def answers(model: Path, prompts: Prompts, max_tokens: int, *, loras: Any = None, **settings: Any) -> list[Steps]:
    with engine(model, **(GPU | settings)) as llm:
        outputs = generate(llm, prompts, max_tokens, lora_request=loras)
        if "speculative_config" in settings:
            check_drafts(llm)
    completions = [output.outputs[0] for output in outputs]
    return [
        [(token, step[token].logprob) for token, step in zip(found.token_ids, found.logprobs, strict=True)]
        for found in completions
    ]


def distance(found: list[Steps], expected: Sequence[Answer]) -> float:
    """The largest difference of log-probabilities, up to the token where rounding decides between two good tokens."""
    differences = []
    for ours, answer in zip(found, expected, strict=True):
        for (token, logprob), wanted, like in zip(ours, answer.token_ids, answer.logprobs, strict=True):
            differences.append(abs(logprob - like))
            if token != wanted:
                break
    assert len(differences) > 4 * len(found), "the comparison must cover mostly decode steps"
    return max(differences)


def compare(
    model: Path,
    *settings: dict[str, Any],
    expected: Sequence[Answer] | None = None,
    prompts: Prompts | None = None,
    max_tokens: int = MAX_TOKENS,
    **changes: Any,
) -> None:
    """``settings``: those of one engine each; ``changes``: those of all engines, and of TRITON_ATTN's."""
    prompts = prompts or random_prompts(LENGTHS)
    expected = expected or hugging_face_answers(model, prompts, max_tokens)
    theirs = distance(answers(model, prompts, max_tokens, attention_backend=PEER, **changes), expected)
    for own in settings:
        ours = distance(answers(model, prompts, max_tokens, **changes, **own), expected)
        assert ours <= max(ALLOWED, 2 * theirs), f"from fp32: ours {ours}, TRITON_ATTN {theirs}"


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, tmp_path: Path) -> None:
    compare(saved(MODELS[name](), tmp_path), volta(), volta(2))


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_options(changes: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "enforce_eager" in changes:
        # Engines in a process of their own: vLLM captures no graphs for a second engine in the same process.
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    compare(peaked(saved(MODELS[name](), tmp_path)), volta(), **changes)


def test_caches_of_8_bits(tmp_path: Path) -> None:
    """e4m3 alone: TRITON_ATTN has no e5m2 on newer GPUs."""
    model = saved(reference.qwen3(8, 2, 128), tmp_path)
    rounding = (lambda stored: stored.to(torch.float8_e4m3fn).to(stored.dtype),) * 2
    expected = hugging_face_answers(model, random_prompts(LENGTHS), MAX_TOKENS, rounding)
    compare(model, volta(), expected=expected, kv_cache_dtype="fp8_e4m3")


def test_host_layers_by_themselves(tmp_path: Path) -> None:
    """Device memory for a request in one of the three layers: "auto" must put others on the host."""
    own = volta("auto") | {"kv_cache_memory_bytes": 3 << 20}
    compare(saved(reference.qwen3(8, 2, 128), tmp_path), own)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_layouts_of_the_cache(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    compare(saved(reference.qwen3(8, 2, 64), tmp_path), volta())


def test_adapters(tmp_path: Path) -> None:
    base = saved(reference.llama(4, 2, 64), tmp_path / "base")
    prompts = random_prompts([300, 20, 700])
    loras, expected = with_adapters(base, prompts, tmp_path)
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK, "loras": loras}
    compare(base, volta(), volta(2), prompts=prompts, expected=expected, **lora)


@pytest.mark.parametrize("drafts", [1, 3])
def test_speculation(drafts: int, tmp_path: Path) -> None:
    """One or three guessed tokens: 8 or 16 rows per KV head, for the narrow and the wide decode kernel."""
    method = NGRAM | {"num_speculative_tokens": drafts}
    prompts = repeating_prompts()
    settings = [volta(layers) | {"speculative_config": method} for layers in (0, 2)]
    compare(saved(reference.qwen3(8, 2, 128), tmp_path, save_repetitive), *settings, prompts=prompts, max_tokens=24)


@pytest.mark.parametrize("host_layers", [0, 2])
def test_needles_up_to_128k_tokens(host_layers: int, tmp_path: Path) -> None:
    path = build_demo_model(tmp_path / "demo", DemoModelSpec(dtype="float16"))
    prompts = [list(make_haystack(n, {"alpha": "7319"}, depths=[0.3], ask="alpha").token_ids) for n in NEEDLES]
    settings = GPU | {"max_model_len": 131072, "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 4 << 30}
    with engine(path, **(settings | volta(host_layers))) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert [output.outputs[0].token_ids[0] for output in outputs] == [token_id("7319")] * len(NEEDLES)
