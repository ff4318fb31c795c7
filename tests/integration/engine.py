"""In-process vLLM engines for tests, and the comparison with a reference."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from vllm import LLM, SamplingParams

from tests.reference_models import Answer

MAX_TOKENS = 12
LOGPROB_TOLERANCE = 1e-4
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
"""Drafts begin at a token that the request has seen before."""


@contextmanager
def engine(model: Path, **changes: Any) -> Iterator[LLM]:
    from vllm.distributed import cleanup_dist_env_and_memory

    settings: dict[str, Any] = {
        "model": str(model),
        "attention_backend": "fastattention",
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 64 << 20,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "seed": 0,
        "disable_log_stats": False,
    }
    settings |= changes
    if settings["attention_backend"] != "fastattention":
        # Otherwise vLLM may choose wrong ones of the test models' 4 experts on GPUs (cuda/start.py).
        compilation: dict[str, Any] = settings.get("compilation_config", {})
        inductor = {"shape_padding": False} | compilation.get("inductor_compile_config", {})
        settings["compilation_config"] = compilation | {"inductor_compile_config": inductor}
    llm = None
    # vLLM collects garbage nine times per engine, half a second each among the objects of all imported modules. Until
    # the engine has ended, these are left out.
    gc.freeze()
    try:
        llm = LLM(**settings)
        yield llm
    finally:
        with mock.patch("gc.unfreeze"):
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()
        gc.unfreeze()
        gc.collect()


def generate(llm: LLM, prompts: Sequence[list[int]], max_tokens: int = MAX_TOKENS, **arguments: Any) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=0, ignore_eos=True, detokenize=False)
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False, **arguments)


def counter(llm: LLM, name: str) -> float:
    """The sum of one of vLLM's metrics since this engine started."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def check_drafts(llm: LLM) -> None:
    """Without drafts, accepted ones and rejected ones, a test of speculation tests nothing."""
    drafted = counter(llm, "vllm:spec_decode_num_draft_tokens")
    accepted = counter(llm, "vllm:spec_decode_num_accepted_tokens")
    assert drafted > accepted > 0, f"{drafted} tokens drafted, {accepted} accepted: both are needed"


def check(outputs: Sequence[Any], expected: Sequence[Answer]) -> None:
    for output, answer in zip(outputs, expected, strict=True):
        completion = output.outputs[0]
        assert list(completion.token_ids) == answer.token_ids, f"prompt of {len(output.prompt_token_ids)} tokens"
        for step, token, wanted in zip(completion.logprobs, answer.token_ids, answer.logprobs, strict=True):
            assert abs(step[token].logprob - wanted) < LOGPROB_TOLERANCE
