"""Options of vLLM that touch attention or the KV cache: real engines answer with them as without them.

Each case runs with all layers on the device and with host layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Olmo2Config
from vllm import LLM, SamplingParams

from fastattention_vllm.integration.cpu.worker import FastAttentionCpuWorker
from tests.integration.engine import MAX_TOKENS, check, counter, engine, generate
from tests.reference_models import (
    WINDOW,
    decoder_shape,
    gemma3,
    hugging_face_answers,
    llama,
    mistral,
    random_prompts,
    save_random,
)

pytestmark = pytest.mark.more

CONFIGS = {
    "llama": lambda: llama(4, 2, 64),
    "mistral": mistral,
    "gemma3": gemma3,
    "olmo2": lambda: Olmo2Config(**decoder_shape(4, 2, 64, 3)),
}
HOST_LAYERS = pytest.mark.parametrize("host_layers", [0, 2], ids=["device layers", "host layers"])


class Extension:
    """A worker extension, as --worker-extension-cls names one."""

    def name_of_worker(self) -> str:
        return type(self).__name__


class OwnWorker(FastAttentionCpuWorker):
    """A user's own worker, which inherits from this package's."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: save_random(config(), folder / name) for name, config in CONFIGS.items()}


def run(model: Path, host_layers: int, lengths: tuple[int, ...] = (1, 17, 64, 300), **changes: Any) -> None:
    """Check one engine's answers against Hugging Face twice; the second time, prefixes may come from the cache."""
    prompts = random_prompts(lengths)
    expected = hugging_face_answers(model, prompts, MAX_TOKENS)
    answer_as(expected, prompts, model, host_layers, **changes)


def answer_as(expected: Any, prompts: list[list[int]], model: Path, host_layers: int, **changes: Any) -> None:
    with with_host_layers(model, host_layers, **changes) as llm:
        for _ in range(2):
            check(generate(llm, prompts), expected)


def with_host_layers(model: Path, host_layers: int, **changes: Any) -> Any:
    options = {"fastattention": {"host_kv_layers": host_layers}}
    return engine(model, block_size=16, additional_config=options, **changes)


@HOST_LAYERS
def test_without_the_sliding_window(models: dict[str, Path], host_layers: int) -> None:
    """vLLM then limits requests to the length of the window."""
    run(
        models["mistral"],
        host_layers,
        (1, 17, WINDOW - MAX_TOKENS),
        disable_sliding_window=True,
        max_model_len=None,
    )


def test_transformers_own_implementation(models: dict[str, Path]) -> None:
    """vLLM changes the class of this model in the whole process, so Hugging Face answers first, and no other test uses
    the class."""
    prompts = random_prompts((1, 17, 64, 300))
    expected = hugging_face_answers(models["olmo2"], prompts, MAX_TOKENS)
    for host_layers in (0, 2):
        answer_as(expected, prompts, models["olmo2"], host_layers, model_impl="transformers")


@HOST_LAYERS
def test_without_cascade_attention(models: dict[str, Path], host_layers: int) -> None:
    run(models["llama"], host_layers, disable_cascade_attn=True, enable_prefix_caching=True)


@HOST_LAYERS
def test_prefix_cache_retention_and_match_unit(models: dict[str, Path], host_layers: int) -> None:
    run(
        models["gemma3"],
        host_layers,
        enable_prefix_caching=True,
        prefix_cache_retention_interval=32,
        prefix_match_unit=16,
    )


@HOST_LAYERS
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_kv_cache_layout(
    models: dict[str, Path], host_layers: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    run(models["llama"], host_layers)


@HOST_LAYERS
def test_worker_extension(models: dict[str, Path], host_layers: int) -> None:
    extension = f"{Extension.__module__}.{Extension.__name__}"
    with with_host_layers(models["llama"], host_layers, worker_extension_cls=extension) as llm:
        assert llm.collective_rpc("name_of_worker") == ["FastAttentionCpuWorker"]
        prompts = random_prompts((17, 64))
        check(generate(llm, prompts), hugging_face_answers(models["llama"], prompts, MAX_TOKENS))


@HOST_LAYERS
def test_a_request_that_skips_the_prefix_cache(models: dict[str, Path], host_layers: int) -> None:
    prompts = random_prompts((300,))
    expected = hugging_face_answers(models["llama"], prompts, MAX_TOKENS)
    with with_host_layers(models["llama"], host_layers, enable_prefix_caching=True) as llm:
        check(generate(llm, prompts), expected)
        assert cached_tokens(llm, prompts, skip=True, expected=expected) == 0
        assert cached_tokens(llm, prompts, skip=False, expected=expected) > 0


def cached_tokens(llm: LLM, prompts: list[list[int]], skip: bool, expected: Any) -> float:
    before = counter(llm, "vllm:prefix_cache_hits")
    params = SamplingParams(
        temperature=0,
        max_tokens=MAX_TOKENS,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
        skip_reading_prefix_cache=skip,
    )
    check(llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False), expected)
    return counter(llm, "vllm:prefix_cache_hits") - before


@HOST_LAYERS
def test_several_samples_of_one_prompt(models: dict[str, Path], host_layers: int) -> None:
    """With top_k=1, all samples are the reference's answer, whether they share the prompt's blocks or not."""
    (prompt,) = random_prompts((130,))
    (answer,) = hugging_face_answers(models["llama"], [prompt], MAX_TOKENS)
    params = SamplingParams(n=3, top_k=1, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    for caching in (False, True):
        with with_host_layers(models["llama"], host_layers, enable_prefix_caching=caching) as llm:
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            assert [list(one.token_ids) for one in output.outputs] == [answer.token_ids] * 3


def test_a_worker_class_that_inherits_runs(models: dict[str, Path]) -> None:
    run(models["llama"], 2, worker_cls=f"{OwnWorker.__module__}.{OwnWorker.__name__}")


def test_another_worker_class_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(Exception, match=r"--worker-cls .*CPUWorker is not supported"):
        with_host_layers(models["llama"], 0, worker_cls="vllm.v1.worker.cpu_worker.CPUWorker").__enter__()


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("enable_sleep_mode", True, "Sleep mode is not supported"),
        ("enable_cumem_allocator", True, "cumem allocator is not supported"),
        ("enable_trace_replay", True, "trace replay requires Model Runner V2"),
        ("attention_config", {"backend_per_kind": {"full_attention": "TRITON_ATTN"}}, "TRITON_ATTN cannot run here"),
    ],
)
def test_options_that_cpus_lack_are_refused(models: dict[str, Path], option: str, value: object, sentence: str) -> None:
    with pytest.raises(Exception, match=sentence):
        with_host_layers(models["llama"], 0, **{option: value}).__enter__()
