"""Engines on a GPU, with none, half and nearly all layers on the host, give the same answers as vLLM's own backend."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import reference_models as reference
from tests.integration.engine import NGRAM, check_drafts, engine, generate
from tests.reference_models import random_prompts, repeating_prompts, save_random, save_repetitive

LAYERS = 4
LENGTHS = (1, 17, 130, 300, 900, 1500)
ALLOWED = 2**-5
"""Tolerance of log-probabilities: 32 steps of an fp16 logit between 1 and 2."""
GPU: dict[str, Any] = {
    "dtype": "float16",
    "max_model_len": 2048,
    "max_num_batched_tokens": 256,
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 512 << 20,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(reference.llama(8, 2, 128, layers=LAYERS), tmp_path_factory.mktemp("llama"))


Steps = list[tuple[int, float]]
"""The tokens of an answer with their log-probabilities."""


def answers(model: Path, **changes: Any) -> list[Steps]:
    with engine(model, **(GPU | changes)) as llm:
        completions = [output.outputs[0] for output in generate(llm, random_prompts(LENGTHS))]
    return [
        [(token, step[token].logprob) for token, step in zip(found.token_ids, found.logprobs, strict=True)]
        for found in completions
    ]


def check(found: list[Steps], expected: list[Steps], allowed: float = ALLOWED) -> None:
    """Log-probabilities agree up to the token where rounding decides between two equally good tokens."""
    compared = 0
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for at, ((token, logprob), (wanted, like)) in enumerate(zip(ours, theirs, strict=True)):
            assert logprob == pytest.approx(like, abs=allowed), (
                f"request {number}: {ours[: at + 1]}, {theirs[: at + 1]}"
            )
            compared += 1
            if token != wanted:
                break
    assert compared > 4 * len(expected), "the comparison must cover mostly decode steps"


@pytest.fixture(scope="module")
def expected(model: Path) -> Callable[[bool], list[Steps]]:
    """Answers of vLLM's backend by whether the model is compiled, because compilation changes the rounding."""

    @functools.cache
    def of_flash_attn(eager: bool) -> list[Steps]:
        return answers(model, attention_backend="FLASH_ATTN", enforce_eager=eager)

    return of_flash_attn


@pytest.mark.parametrize("host_layers", [0, 2, LAYERS - 1])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"enforce_eager": False},
        {"enable_prefix_caching": True},
        {"async_scheduling": False},
    ],
    ids=["eager", "graphs", "prefix-caching", "no-async"],
)
def test_answers_are_those_of_vllms_backend(
    host_layers: int, changes: dict[str, Any], model: Path, expected: Callable[[bool], list[Steps]]
) -> None:
    section = {"host_kv_layers": host_layers, "stream_fraction": 0.5 if host_layers == 2 else "auto"}
    found = answers(model, additional_config={"fastattention": section}, **changes)
    check(found, expected(changes.get("enforce_eager", True)))


@pytest.mark.parametrize("host_layers", [0, 2])
def test_requests_with_a_common_prefix(host_layers: int, model: Path) -> None:
    """vLLM up to 0.31 computes the common prefix of eight or more requests once, if cascade attention is enabled."""
    prefix = random_prompts([600])[0]
    prompts = [prefix + end for end in random_prompts([5 + 3 * n for n in range(12)], seed=2)]
    settings = GPU | {"max_num_seqs": 12, "enable_prefix_caching": True, "disable_cascade_attn": False}
    found = []
    for changes in (
        {"attention_backend": "FLASH_ATTN", "disable_cascade_attn": True},
        {"additional_config": {"fastattention": {"host_kv_layers": host_layers}}},
    ):
        with engine(model, **(settings | changes)) as llm:
            generate(llm, [prefix], max_tokens=1)
            completions = [output.outputs[0] for output in generate(llm, prompts)]
        found.append(
            [[(t, step[t].logprob) for t, step in zip(c.token_ids, c.logprobs, strict=True)] for c in completions]
        )
    check(found[1], found[0])


def test_speculation(tmp_path: Path) -> None:
    """Several query tokens of a request read its host KV at once, and rejected drafts leave no trace."""
    path = save_repetitive(reference.llama(8, 2, 128, layers=LAYERS), tmp_path)
    prompts = repeating_prompts()
    found = []
    for changes in ({}, {"speculative_config": NGRAM}):
        with engine(path, additional_config={"fastattention": {"host_kv_layers": 2}}, **(GPU | changes)) as llm:
            outputs = generate(llm, prompts, max_tokens=24)
            if changes:
                check_drafts(llm)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    agreeing = sum(a == b for one, other in zip(*found, strict=True) for a, b in zip(one, other, strict=True))
    assert agreeing >= 40, "of 48; rounding may change a token and all that follow"


def test_impossible_options_are_refused_in_a_sentence(model: Path) -> None:
    """Runs in a separate process, because a refused engine does not release its memory."""
    script = (
        "from tests.gpu.test_engine import GPU; from tests.integration.engine import engine\n"
        f"with engine({str(model)!r}, additional_config={{'fastattention': {{'host_kv_layers': 9}}}}, **GPU): pass\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode != 0
    assert "host_kv_layers" in done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(model: Path, expected: Callable[[bool], list[Steps]]) -> None:
    section = {"host_kv_layers": 2}
    check(answers(model, additional_config={"fastattention": section}, tensor_parallel_size=2), expected(True))
