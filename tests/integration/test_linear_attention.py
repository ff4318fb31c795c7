"""Models with Gated DeltaNet layers against Hugging Face transformers, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig
from vllm import SamplingParams

from fastattention_vllm.integration import compat
from tests import reference_models as reference
from tests.hybrid_references import hybrid_answers
from tests.integration.engine import MAX_TOKENS, check, engine, generate
from tests.integration.test_models import core_first
from tests.reference_models import random_prompts, save_random

pytestmark = pytest.mark.skipif(
    not compat.has_cpu_linear_attention(), reason="this vLLM's operator for these layers is not replaced"
)

MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3-next": reference.qwen3_next,
    "qwen3.5": reference.qwen3_5,
    "qwen3.5-moe": reference.qwen3_5_moe,
}
STORAGE = {
    "enable_prefix_caching": True,
    "mamba_cache_mode": "align",
    "mamba_block_size": 128,
    "mamba_cache_dtype": "float32",
    "mamba_ssm_cache_dtype": "float32",
}
LENGTHS = (1, 3, 65, 130)
"""Shorter than the convolution, a step and one token, and several steps of 64 tokens."""


def compare(config: PretrainedConfig, path: Path, lengths: tuple[int, ...] = LENGTHS, **settings: Any) -> None:
    """Chunked prefill mixed with decode."""
    model, prompts = save_random(config, path), random_prompts(lengths)
    expected = hybrid_answers(model, prompts, MAX_TOKENS)
    with engine(model, **settings) as llm:
        check(generate(llm, prompts), expected)


@pytest.mark.parametrize("name", core_first(MODELS, ["qwen3-next"]))
def test_tokens_and_logprobs_equal_hugging_face(name: str, tmp_path: Path) -> None:
    compare(MODELS[name](), tmp_path)


@pytest.mark.more
@pytest.mark.parametrize(
    "settings",
    [
        {"enforce_eager": False},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        {"max_num_batched_tokens": 13, "max_num_seqs": 3},
        {"block_size": 8},
        STORAGE,
    ],
    ids=["compiled", "two ranks", "steps within chunks", "an enlarged block", "storage"],
)
def test_settings_change_no_answer(settings: dict[str, Any], tmp_path: Path) -> None:
    compare(reference.qwen3_5(), tmp_path, (1, 64, 65, 300), **settings)


@pytest.mark.more
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next"])
def test_prefix_caching_restores_states(name: str, tmp_path: Path) -> None:
    """vLLM keeps the state at the end of a block, and copies it when another request continues there."""
    model = save_random(MODELS[name](), tmp_path)
    shared = random_prompts([200], seed=7)[0]
    prompts = [shared + tail for tail in random_prompts([3, 40, 90], seed=8)]
    expected = hybrid_answers(model, prompts, MAX_TOKENS)
    with engine(model, enable_prefix_caching=True, block_size=16) as llm:
        block = llm.llm_engine.vllm_config.cache_config.block_size
        assert block > 16, "a page must hold a state"
        check(generate(llm, prompts[:1]), expected[:1])
        outputs = generate(llm, prompts)
        check(outputs, expected)
        again = generate(llm, prompts)
        check(again, expected)
    assert outputs[0].num_cached_tokens >= 200 // block * block
    assert all(output.num_cached_tokens >= 200 // block * block for output in again)


@pytest.mark.more
def test_a_hit_inside_a_block(tmp_path: Path) -> None:
    """The request gets a copy of a block of 32 tokens. Two layers of each block table have different memory."""
    model, prompts = save_random(reference.qwen3_5(layers=8), tmp_path), random_prompts((60,))
    expected = hybrid_answers(model, prompts, MAX_TOKENS)
    with engine(model, enable_prefix_caching=True, block_size=16, prefix_match_unit=16) as llm:
        check(generate(llm, prompts), expected)
        again = generate(llm, prompts)
    check(again, expected)
    assert again[0].num_cached_tokens == 48


@pytest.mark.more
def test_preemption_recomputes_states(tmp_path: Path) -> None:
    model, prompts = save_random(reference.qwen3_5(), tmp_path), random_prompts([60, 61, 62, 63], seed=9)
    expected = hybrid_answers(model, prompts, 80)
    with engine(model, block_size=16, num_gpu_blocks_override=21, max_model_len=256) as llm:
        outputs = generate(llm, prompts, max_tokens=80)
        preempted = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    assert preempted > 0, "the case must preempt to test anything"
    check(outputs, expected)


@pytest.mark.more
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_stays_near_fp32(dtype: str, tmp_path: Path) -> None:
    """The whole model is rounded, so only the first token's log-probability is compared, at the dtype's precision."""
    model, prompts = save_random(reference.qwen3_5(), tmp_path), random_prompts(LENGTHS)
    expected = hybrid_answers(model, prompts, 1)
    with engine(model, dtype=dtype) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    tolerance = {"float16": 0.02, "bfloat16": 0.15}[dtype]
    for output, answer in zip(outputs, expected, strict=True):
        got = output.outputs[0].logprobs[0]
        assert abs(got[answer.token_ids[0]].logprob - answer.logprobs[0]) < tolerance
