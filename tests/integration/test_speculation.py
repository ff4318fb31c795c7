"""Speculative decoding verifies several query tokens per step and must not change greedy tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.integration.engine import check, counter, engine, generate
from tests.reference_models import gemma2, hugging_face_answers, llama, random_prompts, save_random

MAX_TOKENS = 40
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_ngram_speculation_changes_no_token(name: str, tmp_path: Path) -> None:
    model = save_random({"llama": llama(4, 2, 64), "gemma2": gemma2()}[name], tmp_path)
    # Repetitive prompts, so that n-gram drafts are found.
    prompts = [part * 4 for part in random_prompts([5, 17, 33])]
    expected = hugging_face_answers(model, prompts, MAX_TOKENS)
    with engine(model, speculative_config=NGRAM) as llm:
        outputs = generate(llm, prompts, max_tokens=MAX_TOKENS)
        drafted = counter(llm, "vllm:spec_decode_num_draft_tokens")
        accepted = counter(llm, "vllm:spec_decode_num_accepted_tokens")
        # Sampled requests use the other half of the rejection sampler. The same seeds must give the same tokens.
        greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
        sampled = [
            SamplingParams(temperature=0.5, seed=1, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, **kept)
            for kept in ({}, {"top_k": 20, "top_p": 0.9})
        ]
        llm.generate([{"prompt_token_ids": p} for p in prompts[:2]], sampled, use_tqdm=False)
        drafted_for_sampled = counter(llm, "vllm:spec_decode_num_draft_tokens") - drafted
        mixed, again = (
            llm.generate([{"prompt_token_ids": p} for p in prompts], [*sampled, greedy], use_tqdm=False)
            for _ in range(2)
        )
    check(outputs, expected)
    check(mixed[2:], expected[2:])
    assert drafted_for_sampled > 0
    assert [one.outputs[0].token_ids for one in mixed] == [one.outputs[0].token_ids for one in again]
    assert drafted > accepted > 0, f"{drafted} tokens drafted, {accepted} accepted: both are needed"
