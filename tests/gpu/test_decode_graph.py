"""Whole decode steps as CUDA graphs with host layers in them: the same answers as vLLM's own backend, on both ways."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.placement import cuda_bell
from tests import reference_models as reference
from tests.gpu.test_engine import GPU, LAYERS, Steps, answers, check, model  # noqa: F401
from tests.integration.engine import engine, generate
from tests.reference_models import random_prompts, save_random

GRAPHS: dict[str, Any] = {"enforce_eager": False}
WAYS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "whole graphs only": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "prefix caching": {"enable_prefix_caching": True},
    "no async": {"async_scheduling": False},
    "few blocks": {"kv_cache_memory_bytes": 3 << 20, "max_model_len": 1536},
}


def with_calls(path: Path, prompts: list[list[int]], max_tokens: int = 12, **changes: Any) -> tuple[list[Steps], int]:
    """Answers, and the number of calls that graphs have made of the CPU."""
    with engine(path, **(GPU | GRAPHS | changes)) as llm:
        found = host_layers.find(llm.llm_engine.vllm_config)
        assert found is not None
        assert found.graph_calls is not None
        before = found.graph_calls.thread.counters().calls
        completions = [output.outputs[0] for output in generate(llm, prompts, max_tokens=max_tokens)]
        calls = found.graph_calls.thread.counters().calls - before
    return [[(t, step[t].logprob) for t, step in zip(c.token_ids, c.logprobs, strict=True)] for c in completions], calls


@functools.cache
def of_flash_attn(path: Path, lengths: tuple[int, ...], compiled: bool) -> list[Steps]:
    way = GRAPHS if compiled else GRAPHS | WAYS["whole graphs only"]
    with engine(path, attention_backend="FLASH_ATTN", **(GPU | way)) as llm:
        completions = [output.outputs[0] for output in generate(llm, random_prompts(lengths))]
    return [[(t, step[t].logprob) for t, step in zip(c.token_ids, c.logprobs, strict=True)] for c in completions]


LENGTHS = (1, 17, 130, 300, 900, 1500)


def test_this_gpu_rings() -> None:
    assert cuda_bell.why_not() is None


@pytest.mark.parametrize("section", [{}, {"volta_kernels": "ptx"}], ids=["flash", "volta"])
@pytest.mark.parametrize("second_runner", ["0", "1"], ids=["v1", "v2"])
@pytest.mark.parametrize("hosts", [1, LAYERS - 1])
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_vllms_backend(
    way: str,
    hosts: int,
    second_runner: str,
    section: dict[str, Any],
    model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = of_flash_attn(model, LENGTHS, way != "whole graphs only")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", second_runner)
    config = {"fastattention": section | {"host_kv_layers": hosts}}
    found, calls = with_calls(model, random_prompts(LENGTHS), additional_config=config, **WAYS[way])
    check(found, expected)
    assert calls >= 8 * hosts, "most decode steps are graphs"
    assert calls % hosts == 0


def test_windows_and_sinks(tmp_path: Path) -> None:
    path = save_random(reference.gpt_oss(), tmp_path)
    # FlashAttention has sinks in bf16 only.
    changes = GRAPHS | {"dtype": "bfloat16", "additional_config": {"fastattention": {"host_kv_layers": 2}}}
    expected = answers(path, **changes, compilation_config={"cudagraph_mode": "PIECEWISE"})
    found, calls = with_calls(path, random_prompts(LENGTHS), **changes)
    check(found, expected)
    assert calls


def test_speculation(model: Path) -> None:  # noqa: F811
    prompts = [(prompt * 8)[:600] for prompt in random_prompts((40, 60))]
    section = {"additional_config": {"fastattention": {"host_kv_layers": 2}}}
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}}
    plain, _ = with_calls(model, prompts, 24, **section)
    found, calls = with_calls(model, prompts, 24, **section, **drafts)
    check(found, plain)
    assert calls


def test_batches_of_every_size_and_steps_in_pieces_between(model: Path) -> None:  # noqa: F811
    """Requests end and others arrive, padding comes and goes, and every other step is not a graph."""
    prompts = random_prompts((1, 700, 33, 5, 260, 90, 16, 17, 800, 2))
    section = {"additional_config": {"fastattention": {"host_kv_layers": 3}}}
    eager = answers_of(model, prompts, **section)
    for turns in (None, 2, 3):
        with engine(model, **(GPU | GRAPHS | section | {"max_num_seqs": 4})) as llm:
            found = host_layers.find(llm.llm_engine.vllm_config)
            assert found is not None
            if turns:
                alternate(found, turns)
            completions = [
                llm_answer(llm, prompts[:1], 3),
                *(llm_answer(llm, [prompt], 2 + 3 * at) for at, prompt in enumerate(prompts)),
                llm_answer(llm, prompts, 20),
            ]
        check(completions[-1], eager)
        check(completions[3], [eager[2][:8]])


def alternate(found: Any, turns: int) -> None:
    """Let every ``turns``-th step run in pieces."""
    steps = 0

    def allows(contexts: int) -> bool:
        nonlocal steps
        steps += 1
        return steps % turns != 0

    found.allows_whole_step = allows


def llm_answer(llm: Any, prompts: list[list[int]], tokens: int) -> list[Steps]:
    completions = [output.outputs[0] for output in generate(llm, prompts, max_tokens=tokens)]
    return [[(t, step[t].logprob) for t, step in zip(c.token_ids, c.logprobs, strict=True)] for c in completions]


def answers_of(path: Path, prompts: list[list[int]], **section: Any) -> list[Steps]:
    with engine(path, **(GPU | section | {"max_num_seqs": 4})) as llm:
        return llm_answer(llm, prompts, 20)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(model: Path) -> None:  # noqa: F811
    """Each rank has a thread and a bell of its own."""
    section = {"additional_config": {"fastattention": {"host_kv_layers": 2}}}
    expected: Callable[[], list[Steps]] = lambda: answers(model, **GRAPHS, **section)  # noqa: E731
    check(answers(model, **GRAPHS, **section, tensor_parallel_size=2), expected())
