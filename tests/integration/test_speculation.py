"""Speculative decoding verifies several query tokens per step and must not change greedy tokens.

Drafters with random weights are never right, so most tests replace what they propose (``tests/drafters.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs

from fastattention_vllm.integration import compat, support
from fastattention_vllm.integration.host_layers import layers as host_layers
from tests import drafters
from tests import reference_models as reference
from tests.hybrid_references import hybrid_answers
from tests.integration.engine import NGRAM, check, counter, engine, generate
from tests.integration.test_models import core_first
from tests.reference_models import gemma2, hugging_face_answers, llama, random_prompts, save_random

MAX_TOKENS = 40
needs_drafters = pytest.mark.skipif(not support.prepares_drafts(), reason="this vLLM's kernels are not replaced")
needs_linear_attention = pytest.mark.skipif(
    not compat.has_cpu_linear_attention(), reason="this vLLM's operator for these layers is not replaced"
)
LENGTHS = (1, 15, 65, 130)
"""With steps of 64 tokens and blocks of 16 or 32: less than a block, and prompts in several steps."""
CACHED: dict[str, Any] = {"enable_prefix_caching": True, "block_size": 16}


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


def small_draft_model(target: Path, path: Path) -> Path:
    """Another number of KV heads and another head size than the model's."""
    return save_random(llama(2, 1, 32, layers=2), path, seed=3)


HEADS: dict[str, Callable[[Path, Path], Path]] = {
    "draft_model": small_draft_model,
    "eagle": drafters.save_eagle,
    "eagle3": drafters.save_eagle3,
}


def drafted(llm: LLM) -> tuple[float, float]:
    """Draft tokens since this engine started, and how many of them were accepted."""
    return counter(llm, "vllm:spec_decode_num_draft_tokens"), counter(llm, "vllm:spec_decode_num_accepted_tokens")


@needs_drafters
@pytest.mark.parametrize("method", core_first(HEADS, ["draft_model"]))
def test_drafts_change_no_token(method: str, tmp_path: Path) -> None:
    """Accepted and rejected drafts over block borders, the second time with cached prefixes."""
    model = save_random(llama(4, 2, 64), tmp_path / "model")
    prompts = random_prompts(LENGTHS)
    expected = hugging_face_answers(model, prompts, MAX_TOKENS)
    speculation = {"method": method, "model": str(HEADS[method](model, tmp_path / method)), "num_speculative_tokens": 3}
    with drafters.knowing(prompts, expected), engine(model, speculative_config=speculation, **CACHED) as llm:
        check(generate(llm, prompts, max_tokens=MAX_TOKENS), expected)
        again = generate(llm, prompts, max_tokens=MAX_TOKENS)
        proposed, accepted = drafted(llm)
    check(again, expected)
    assert proposed > accepted > proposed / 4
    assert all(output.num_cached_tokens > 0 for output in again[2:])


@needs_drafters
def test_the_model_itself_drafts_what_it_answers(tmp_path: Path) -> None:
    """Every draft is accepted, so the draft model saw exactly the model's tokens, positions and slots."""
    model, prompts = save_random(llama(4, 2, 64), tmp_path), random_prompts(LENGTHS)
    expected = hugging_face_answers(model, prompts, 18)
    speculation = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    with engine(model, speculative_config=speculation, block_size=16) as llm:
        check(generate(llm, prompts, max_tokens=18), expected)
        proposed, accepted = drafted(llm)
    assert proposed == accepted > 0


SAMPLED: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "both": {"top_k": 20, "top_p": 0.9},
    "neither": {},
    "seed": {"top_k": 20, "seed": 1},
    "penalties": {"top_k": 20, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "few tokens": {"top_k": 20, "allowed_token_ids": list(range(40))},
    "no end": {"top_k": 20, "min_tokens": 5},
    "logprobs": {"top_k": 20, "logprobs": 2, "prompt_logprobs": 2},
}
DRAFTERS = ["ngram", "draft_model", "eagle", "eagle3"]


@pytest.mark.parametrize(
    "method",
    [pytest.param(one, marks=() if one == "ngram" else [needs_drafters, pytest.mark.more]) for one in DRAFTERS],
)
def test_every_way_of_sampling_passes_steps_without_drafts(method: str, tmp_path: Path) -> None:
    """While only prompts are computed, no request has draft tokens, and the rejection sampler gets no rows."""
    model, prompts = save_random(llama(4, 2, 64), tmp_path / "model"), random_prompts(LENGTHS)
    expected = hugging_face_answers(model, prompts, 8)
    speculation = NGRAM
    if method != "ngram":
        path = HEADS[method](model, tmp_path / method)
        speculation = {"method": method, "model": str(path), "num_speculative_tokens": 3}
    settings = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True, "detokenize": False}
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    with engine(model, speculative_config=speculation) as llm:
        for params in SAMPLED.values():
            for some in (requests, requests[-1:]):
                outputs = llm.generate(some, SamplingParams(**settings, **params), use_tqdm=False)
                assert [len(one.outputs[0].token_ids) for one in outputs] == [8] * len(some)
                if allowed := params.get("allowed_token_ids"):
                    assert all(set(one.outputs[0].token_ids) <= set(allowed) for one in outputs)
        greedy = llm.generate(requests, SamplingParams(**settings, top_k=1), use_tqdm=False)
        assert counter(llm, "vllm:spec_decode_num_draft_tokens") > 0
    assert [list(one.outputs[0].token_ids) for one in greedy] == [answer.token_ids for answer in expected]


@needs_linear_attention
@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("qwen3_5", "mtp"),
        pytest.param("qwen3_next", "mtp", marks=pytest.mark.full),
        pytest.param("qwen3_5", "ngram", marks=pytest.mark.full),
    ],
)
def test_states_follow_accepted_drafts(name: str, method: str, tmp_path: Path) -> None:
    """A request continues with the state of its last accepted token, also where it enters another block."""
    if method == "ngram" and not support.has_numba():
        pytest.skip("numba is not installed")
    plain = save_random(getattr(reference, name)(), tmp_path / "model")
    model = drafters.add_mtp(plain, tmp_path / "mtp")
    prompts = [part * 4 for part in random_prompts((5, 17, 33))] if method == "ngram" else random_prompts(LENGTHS)
    expected = hybrid_answers(plain, prompts, MAX_TOKENS)
    speculation = NGRAM if method == "ngram" else {"method": "mtp", "num_speculative_tokens": 3}
    every = 5 if method == "mtp" else None
    with drafters.knowing(prompts, expected, every), engine(model, speculative_config=speculation, **CACHED) as llm:
        assert llm.llm_engine.vllm_config.cache_config.block_size < MAX_TOKENS, "no request would enter another block"
        check(generate(llm, prompts, max_tokens=MAX_TOKENS), expected)
        again = generate(llm, prompts, max_tokens=MAX_TOKENS)
        proposed, accepted = drafted(llm)
    check(again, expected)
    assert proposed > accepted
    assert accepted > 0 or method == "ngram", "random models rarely repeat themselves"
    assert again[-1].num_cached_tokens > 0


@needs_drafters
@pytest.mark.more
@pytest.mark.parametrize("method", ["draft_model", "mtp"])
def test_a_drafters_layers_stay_on_the_device(method: str, tmp_path: Path) -> None:
    """And they are counted: vLLM makes exactly the planned number of blocks."""
    prompts = random_prompts(LENGTHS)
    if method == "mtp":
        if not compat.has_cpu_linear_attention():
            pytest.skip("this vLLM's operator for these layers is not replaced")
        plain = save_random(reference.qwen3_5(layers=8), tmp_path / "model")
        model, expected = drafters.add_mtp(plain, tmp_path / "mtp"), hybrid_answers(plain, prompts, MAX_TOKENS)
        speculation: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 3}
    else:
        model = save_random(llama(4, 2, 64), tmp_path / "model")
        expected = hugging_face_answers(model, prompts, MAX_TOKENS)
        draft = save_random(llama(4, 2, 64, layers=2), tmp_path / "draft", seed=3)
        speculation = {"method": method, "model": str(draft), "num_speculative_tokens": 3}
    options = {"additional_config": {"fastattention": {"host_kv_layers": 1}}}
    with drafters.knowing(prompts, expected), engine(model, speculative_config=speculation, **CACHED, **options) as llm:
        config = llm.llm_engine.vllm_config
        placed = host_layers.find(config)
        assert placed is not None
        context = config.compilation_config.static_forward_context
        assert set(placed.targets) == {
            name for name, layer in context.items() if getattr(layer, "kv_sharing_target_layer_name", None)
        }
        assert len(placed.targets) == 1
        blocks = placed.placement.max_blocks(config.cache_config.kv_cache_memory_bytes, placed.budget)
        assert config.cache_config.num_gpu_blocks == blocks
        check(generate(llm, prompts, max_tokens=MAX_TOKENS), expected)
        proposed, accepted = drafted(llm)
    assert proposed > accepted > 0


@needs_drafters
def test_host_layers_need_a_drafter_with_equal_blocks(tmp_path: Path) -> None:
    """vLLM ends with a KeyError there: a group of layers of several sizes lists none that shares a cache."""
    model = save_random(llama(4, 2, 64), tmp_path / "model")
    draft = small_draft_model(model, tmp_path / "draft")
    arguments = EngineArgs(
        model=str(model),
        attention_backend="fastattention",
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        speculative_config={"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3},
        additional_config={"fastattention": {"host_kv_layers": 1}},
    )
    with pytest.raises(ValueError, match="a drafter with KV heads of another number or size is not supported"):
        arguments.create_engine_config()
