"""Host layers in the installed version: answers do not depend on where a layer's KV cache is.

Its name keeps pytest from collecting it: tests/integration/host_layers/test_layers.py has these cases and more for the
version that `make test` installs.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # this process inspects the caches
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"

from conformance_server import check_needle, serving
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs

from fastattention_vllm.demo.haystack import make_haystack
from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DemoModelSpec
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.refusal import sentence

LAYERS = 4
BLOCK, CHUNK = 16, 64
# Lengths around block and chunk borders and many chunks long; more requests than run at once.
LENGTHS = (30, 47, 48, 49, 63, 64, 65, 200, 700)
KV_BYTES = 32 << 20
HOST = {"fastattention": {"host_kv_layers": LAYERS - 1}}


@dataclass(frozen=True)
class Round:
    """The answers to all prompts, and the number of tokens that came from the prefix cache."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    """Log probabilities of the two likeliest tokens at each position."""
    cached: list[int]


@dataclass(frozen=True)
class Run:
    first: Round
    again: Round
    """A second round of the same prompts: the prefix cache now has all their whole blocks."""
    blocks: int


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_demo_model(
        tmp_path_factory.mktemp("model") / "demo", DemoModelSpec(num_layers=LAYERS, dtype="float32")
    )


@pytest.fixture(scope="module")
def without(model: Path) -> Run:
    """The run without host layers."""
    with engine(model) as llm:
        assert host_layers.find(llm.llm_engine.vllm_config) is None
        return run(llm)


@contextmanager
def engine(model: Path, **options: Any) -> Iterator[LLM]:
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        model=str(model),
        attention_backend="fastattention",
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=CHUNK,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        block_size=BLOCK,
        kv_cache_memory_bytes=KV_BYTES,
        enforce_eager=True,
        seed=0,
        additional_config={"fastattention": options},
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def prompts() -> list[list[int]]:
    """Each prompt hides its own number at its own depth; a wrong page or mask gives another answer."""
    return [
        list(make_haystack(length, {"alpha": str(1000 + 7 * index)}, depths=[index / 9], ask="alpha").token_ids)
        for index, length in enumerate(LENGTHS)
    ]


def run(llm: LLM) -> Run:
    count = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert count is not None
    return Run(ask(llm), ask(llm), count)


def ask(llm: LLM) -> Round:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    return Round(
        [list(answer.token_ids) for answer in answers],
        [[entry.logprob for step in answer.logprobs for entry in step.values()] for answer in answers],
        [output.num_cached_tokens for output in outputs],
    )


def check_same(answer: Round, expected: Round) -> None:
    assert answer.tokens == expected.tokens
    assert answer.cached == expected.cached
    for found, wanted in zip(answer.logprobs, expected.logprobs, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-4)


def test_the_v2_model_runner_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No version has a V2 model runner that runs on CPUs without Triton. One sentence that names the version says so.

    This test runs before any engine starts, because engines may keep a copy of vLLM's environment.
    """
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match="V2 model runner") as caught:
        EngineArgs(model=str(model), additional_config=HOST).create_engine_config()
    text = sentence(caught.value)
    assert text is not None
    assert metadata.version("vllm") in text
    assert text.endswith("set VLLM_USE_V2_MODEL_RUNNER=0.")


def test_the_compared_runs_cover_the_interesting_cases(without: Run) -> None:
    """The numbers come back, prompts take several steps, and the prefix cache has whole blocks of all prompts."""
    first = without.first
    assert max(LENGTHS) > 10 * CHUNK
    assert len({tuple(tokens) for tokens in first.tokens}) == len(LENGTHS)
    whole_blocks = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
    assert min(whole_blocks) > 0
    assert without.again.cached == whole_blocks


@pytest.mark.parametrize("count", [0, LAYERS // 2, LAYERS - 1])
def test_answers_equal_those_without_host_layers(model: Path, without: Run, count: int) -> None:
    """The device's memory, which then only holds the other layers, also has space for more blocks."""
    with engine(model, host_kv_layers=count) as llm:
        layers = host_layers.find(llm.llm_engine.vllm_config)
        found = run(llm)
        if count:
            assert layers is not None
            assert layers.pool is not None
            assert len(layers.pool.caches) == len(layers.placement.host) == count
            assert all(cache.any() for cache in layers.pool.caches.values())
        else:
            assert layers is None
    assert found.blocks == without.blocks * LAYERS // (LAYERS - count)
    check_same(found.first, without.first)
    check_same(found.again, without.again)


def test_the_needle_is_found_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is started as users do, with its engine in a separate process."""
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    with serving(tmp_path, "--additional-config", json.dumps(HOST)) as served:
        log = served.log.read_text()
        assert "KV placement:" in log, "some layers' caches must be in host memory"
        check_needle(served, 0.5)
