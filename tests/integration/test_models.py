"""Every attention feature, in the models that have it, against Hugging Face transformers in fp32."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from tests import reference_models as reference
from tests.integration.engine import MAX_TOKENS, check, engine, generate
from tests.reference_models import hugging_face_answers, random_prompts, save_random

# One token, and lengths around block and window borders and of several windows and chunks of 64.
LENGTHS = (1, 15, 17, 47, 48, 49, 64, 65, 130, 300)

MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "mistral": reference.mistral,
    "gemma2": reference.gemma2,
    "gemma3": reference.gemma3,
    "gemma3n": reference.gemma3n,
    "gpt-oss": reference.gpt_oss,
    "qwen3-moe": reference.qwen3_moe,
    "mixtral": reference.mixtral,
    "phi3": reference.phi3,
    "bloom": reference.bloom,
    "opt": reference.opt,
}

# One model for every attention feature runs in `make test`, the others in `make test-more`.
CORE = ("gemma2", "gemma3n", "gpt-oss", "bloom")


def core_first(names: Iterable[Any], core: Container[Any]) -> list[Any]:
    return [name if name in core else pytest.param(name, marks=pytest.mark.more) for name in names]


def compare(config: PretrainedConfig, path: Path, **settings: Any) -> None:
    """Chunked prefill (300-token prompts in 64-token steps) mixed with decode."""
    model = save_random(config, path)
    prompts = random_prompts(LENGTHS)
    expected = hugging_face_answers(model, prompts, MAX_TOKENS)
    with engine(model, **settings) as llm:
        check(generate(llm, prompts), expected)


@pytest.mark.parametrize("name", core_first(MODELS, CORE))
def test_tokens_and_logprobs_equal_hugging_face(name: str, tmp_path: Path) -> None:
    compare(MODELS[name](), tmp_path)


@pytest.mark.more
@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_compiled_equals_hugging_face(name: str, tmp_path: Path) -> None:
    compare(MODELS[name](), tmp_path, enforce_eager=False)


@pytest.mark.more
@pytest.mark.parametrize("name", ["gpt-oss", "bloom"])
def test_two_ranks_equal_hugging_face(name: str, tmp_path: Path) -> None:
    """Each rank has the sinks and slopes of its own heads."""
    compare(MODELS[name](), tmp_path, tensor_parallel_size=2, distributed_executor_backend="mp")


@pytest.mark.more
@pytest.mark.parametrize("name", ["gemma2", "gemma3n"])
def test_prefix_caching_of_windowed_and_shared_layers(name: str, tmp_path: Path) -> None:
    model = save_random(MODELS[name](), tmp_path)
    shared = random_prompts([200], seed=7)[0]
    prompts = [shared + tail for tail in random_prompts([3, 40, 90], seed=8)]
    expected = hugging_face_answers(model, prompts, MAX_TOKENS)
    with engine(model, enable_prefix_caching=True, block_size=16) as llm:
        check(generate(llm, prompts[:1]), expected[:1])
        outputs = generate(llm, prompts)
    check(outputs, expected)
    assert all(output.num_cached_tokens >= 128 for output in outputs), [o.num_cached_tokens for o in outputs]


@pytest.mark.more
def test_fast_prefill_of_shared_layers(tmp_path: Path) -> None:
    """The layers that share a cache compute only the last token of a prompt."""
    compare(reference.gemma3n(), tmp_path, kv_sharing_fast_prefill=True)


@pytest.mark.parametrize("head_size", core_first([32, 96, 112, 192, 256], [96]))
def test_head_sizes_equal_hugging_face(head_size: int, tmp_path: Path) -> None:
    compare(reference.llama(4, 2, head_size, layers=2), tmp_path)
