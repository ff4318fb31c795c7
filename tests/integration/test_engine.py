"""A real vLLM engine against Hugging Face transformers, in fp32: same greedy tokens, log-probabilities within 1e-4."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PretrainedConfig
from vllm import SamplingParams

from tests.integration.engine import MAX_TOKENS, check, counter, engine, generate
from tests.reference_models import hugging_face_answers, llama, qwen3, random_prompts, save_random

# One token, and lengths around block and tile borders and of several chunks of 64.
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 130, 300)


MODELS: dict[str, PretrainedConfig] = {
    "llama-gqa-64": llama(4, 2, 64),
    "llama-mha-128": llama(2, 2, 128),
    "qwen3-mqa-128": qwen3(4, 1, 128),
    "qwen3-gqa-64": qwen3(8, 2, 64),
    "llama-gqa-80": llama(4, 2, 80),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_random(config, root / name) for name, config in MODELS.items()}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logprobs_equal_hugging_face(name: str, models: dict[str, Path], prompts: list[list[int]]) -> None:
    """Chunked prefill (300-token prompts in 64-token steps) mixed with decode, more requests than fit at once."""
    expected = hugging_face_answers(models[name], prompts, MAX_TOKENS)
    with engine(models[name]) as llm:
        check(generate(llm, prompts), expected)


@pytest.mark.parametrize("name", ["llama-gqa-64", "qwen3-mqa-128"])
def test_compiled_equals_hugging_face(name: str, models: dict[str, Path], prompts: list[list[int]]) -> None:
    expected = hugging_face_answers(models[name], prompts, MAX_TOKENS)
    with engine(models[name], enforce_eager=False) as llm:
        check(generate(llm, prompts), expected)


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_prefix_caching_serves_from_cache_without_changing_answers(block_size: int, models: dict[str, Path]) -> None:
    shared = random_prompts([200], seed=7)[0]
    prompts = [shared + tail for tail in random_prompts([3, 40, 90], seed=8)]
    expected = hugging_face_answers(models["llama-gqa-64"], prompts, MAX_TOKENS)
    with engine(models["llama-gqa-64"], enable_prefix_caching=True, block_size=block_size) as llm:
        first = generate(llm, prompts[:1])
        check(first, expected[:1])
        outputs = generate(llm, prompts)
        check(outputs, expected)
    cached = [output.num_cached_tokens for output in outputs]
    assert all(tokens >= 200 // block_size * block_size for tokens in cached), cached


def test_preemption_recomputes_to_the_same_answers(models: dict[str, Path]) -> None:
    prompts = random_prompts([60, 61, 62, 63], seed=9)
    expected = hugging_face_answers(models["llama-gqa-64"], prompts, 80)
    # 4 requests grow to 140 tokens = 9 blocks each; 20 blocks hold two of them.
    with engine(models["llama-gqa-64"], block_size=16, num_gpu_blocks_override=21, max_model_len=256) as llm:
        outputs = generate(llm, prompts, max_tokens=80)
        assert counter(llm, "vllm:num_preemptions") > 0, "the case must preempt to test anything"
    check(outputs, expected)


@pytest.mark.parametrize("block_size", [8, 24])
def test_any_block_size_runs(block_size: int, models: dict[str, Path], prompts: list[list[int]]) -> None:
    expected = hugging_face_answers(models["llama-gqa-64"], prompts, MAX_TOKENS)
    with engine(models["llama-gqa-64"], block_size=block_size) as llm:
        check(generate(llm, prompts), expected)


def test_seeded_sampling_does_not_depend_on_the_chunks(models: dict[str, Path]) -> None:
    prompts = random_prompts([200, 30])
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    sampled = []
    for step in (64, 512):
        with engine(models["llama-gqa-64"], max_num_batched_tokens=step) as llm:
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        sampled.append([list(output.outputs[0].token_ids) for output in outputs])
    assert sampled[0] == sampled[1]


def test_an_automatic_length_fits_the_cache(models: dict[str, Path]) -> None:
    with engine(models["llama-gqa-64"], max_model_len=-1, kv_cache_memory_bytes=3 << 20) as llm:
        fitted = llm.llm_engine.vllm_config.model_config.max_model_len
        assert 128 <= fitted < 4096
        assert len(generate(llm, random_prompts([fitted - 20]))[0].outputs[0].token_ids) == MAX_TOKENS


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_stays_near_fp32(dtype: str, models: dict[str, Path], prompts: list[list[int]]) -> None:
    """The whole model is rounded, so only the first token's log-probability is compared, at the dtype's precision."""
    expected = hugging_face_answers(models["llama-gqa-64"], prompts, 1)
    with engine(models["llama-gqa-64"], dtype=dtype) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    tolerance = {"float16": 0.02, "bfloat16": 0.15}[dtype]
    for output, answer in zip(outputs, expected, strict=True):
        got = output.outputs[0].logprobs[0]
        assert answer.token_ids[0] in got
        assert abs(got[answer.token_ids[0]].logprob - answer.logprobs[0]) < tolerance


def test_attention_threads_follow_the_option(models: dict[str, Path]) -> None:
    from fastattention_vllm.attention.cpu import kernels as cpu
    from fastattention_vllm.placement.cpus import physical_cpus

    with engine(models["llama-gqa-64"], additional_config={"fastattention": {"cpu_threads": 1}}):
        assert cpu.num_threads() == 1
    with engine(models["llama-gqa-64"]):
        assert cpu.num_threads() == len(physical_cpus())
