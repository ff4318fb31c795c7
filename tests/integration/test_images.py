"""Models with images against Hugging Face transformers, in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText
from vllm import LLM, SamplingParams

from fastattention_vllm.integration import compat
from tests.image_references import IMAGE, MODELS, Case, gemma3, image_answers, letters, picture, save_with_processor
from tests.integration.engine import check, counter, engine, generate
from tests.reference_models import hugging_face_answers, random_prompts, save_random

pytestmark = pytest.mark.skipif(not compat.has_kernel_dispatcher(), reason="refused with this vLLM")

MAX_TOKENS = 8
STEP = 64
BEFORE = 40
"""Tokens of text before the first image, which is no multiple of a block."""
CASES = (
    Case(f"{letters(BEFORE, 1)}{IMAGE}{letters(3, 2)}", [picture(0, 96, 128)]),
    Case(f"{letters(BEFORE, 1)}{IMAGE}{letters(3, 2)}", [picture(1, 96, 128)]),
    Case(f"{letters(3, 3)}{IMAGE}{letters(70, 4)}{IMAGE}{letters(5, 5)}", [picture(2, 300, 320), picture(3, 60, 200)]),
)
"""Two images below the same text, and an image longer than a step beside a small one."""
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2-vl": {"additional_config": {"fastattention": {"host_kv_layers": [1]}}},
    "qwen2.5-vl": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
}
"""Models that run with host layers, or on two ranks."""
LIKE_OTHERS = ("qwen3-vl", "qwen3.5-moe")
"""They have no code of their own here."""


def ask(llm: LLM, cases: Sequence[Case]) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
    return llm.generate([case.for_vllm() for case in cases], params, use_tqdm=False)


def compare(name: str, path: Path, **settings: Any) -> None:
    """Chunked prefill, then the same prompts from the prefix cache."""
    model = save_with_processor(MODELS[name](), path)
    expected = image_answers(model, CASES, MAX_TOKENS)
    assert expected[0].token_ids != expected[1].token_ids, "the images must differ to test anything"
    changes = {"skip_tokenizer_init": False, "enable_prefix_caching": True, "block_size": 16} | settings
    with engine(model, max_num_batched_tokens=STEP, **changes) as llm:
        block = llm.llm_engine.vllm_config.cache_config.block_size
        check(ask(llm, CASES[:1]), expected[:1])
        first = ask(llm, CASES)
        check(first, expected)
        again = ask(llm, CASES)
        check(again, expected)
        assert llm.llm_engine.model_config.multimodal_config.get_limit_per_prompt("video") == 0
        assert counter(llm, "vllm:mm_cache_hits") > 0
    assert len(first[2].prompt_token_ids) > 2 * STEP
    assert first[1].num_cached_tokens == BEFORE // block * block, "only the text is the same"
    for output in (first[0], *again):
        assert output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // block * block


@pytest.mark.more
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in LIKE_OTHERS else name for name in MODELS]
)
def test_tokens_and_logprobs_equal_hugging_face(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path, **SETTINGS.get(name, {}))


@pytest.mark.more
def test_the_text_of_a_model_with_two_way_images(tmp_path: Path) -> None:
    model = save_random(gemma3(), tmp_path, kind=AutoModelForImageTextToText)
    prompts = random_prompts([3, 49, 130])
    expected = hugging_face_answers(model, prompts, MAX_TOKENS)
    with engine(model, max_num_batched_tokens=STEP, limit_mm_per_prompt={"image": 0}) as llm:
        check(generate(llm, prompts, MAX_TOKENS), expected)
