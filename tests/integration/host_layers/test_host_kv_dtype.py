"""Host layers that store 8 bits: engines against the same engine whose pool holds rounded numbers in fp32."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs

from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.host_layers import plan as host_plan
from fastattention_vllm.integration.serving.worker_stats import of_host_layers
from fastattention_vllm.placement import host_attention, prefetch, stored_rows
from fastattention_vllm.placement.host_attention import HostAttention
from fastattention_vllm.placement.stored_rows import TORCH_DTYPES
from fastattention_vllm.placement.stream_split import StreamSplit
from tests.integration.engine import generate
from tests.integration.host_layers.test_layers import KV_BYTES, PAGE, answers_of, host, llama, num_blocks, small_blocks
from tests.integration.host_layers.test_layers import host_layers_of as host_layers_in
from tests.integration.test_fp8_kv_cache import distance
from tests.reference_models import Answer, random_prompts, save_random

LENGTHS = (1, 15, 17, 65, 130, 300)
HOST = [1, 2, 3]
SCALES = (0.25, 0.125)
"""Powers of two, because others round differently before and after the dot product."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "STAGING_BYTES", PAGE)
    monkeypatch.setattr(host_attention, "MIN_STREAMED_BYTES", 1)


def set_scales(llm: Any) -> None:
    for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values():
        layer._k_scale_float, layer._v_scale_float = SCALES


def answers_over_rounded(model: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
    """The answers of an fp32 pool into which rounded keys and values are written."""
    attend = HostAttention.attend
    scales = (1.0, 1.0) if dtype == torch.int8 else SCALES

    def attend_rounded(
        self: HostAttention, step: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any
    ) -> None:
        attend(self, step, query, *stored_rows.rounded(key, value, dtype, scales).widened(key.dtype, scales), *more)

    with monkeypatch.context() as patch, small_blocks(model, **host(HOST)) as llm:
        patch.setattr(HostAttention, "attend", attend_rounded)
        return answers_of(generate(llm, random_prompts(LENGTHS)))


def difference(ours: Sequence[Answer], theirs: Sequence[Answer]) -> float:
    """The median of log-probabilities. Tokens must be equal.

    A sum that is off by its last bit sometimes rounds to the next 8-bit number. That moves a few log-probabilities, but
    not the median.
    """
    differences = []
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids == b.token_ids
        differences += [abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)]
    return statistics.median(differences)


@pytest.mark.parametrize(
    "name", ["int8", *(pytest.param(name, marks=pytest.mark.more) for name in ("fp8_e4m3", "fp8_e5m2"))]
)
def test_answers_equal_those_over_rounded_keys_and_values(
    name: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, decode steps and ranges that the device reads; and close to those of the unrounded pool."""
    dtype = TORCH_DTYPES[name]
    plain = 4 * 2 * 16 * 2 * 64  # bytes per block of an fp32 layer
    stored = 2 * 16 * 2 * (64 + 4 * (name == "int8"))
    expected = answers_over_rounded(model, dtype, monkeypatch)
    with small_blocks(model, kv_cache_memory_bytes=KV_BYTES, **host(HOST, host_kv_dtype=name)) as llm:
        set_scales(llm)
        layers = host_layers_in(llm)
        assert layers.pool is not None
        assert num_blocks(llm) == KV_BYTES // plain
        assert layers.pool.memory.nbytes == num_blocks(llm) * len(HOST) * stored
        assert {cache.dtype for cache in layers.pool.caches.values()} == {dtype}
        found = answers_of(generate(llm, random_prompts(LENGTHS)))
        apart = difference(found, expected)
        layers.set_stream_split(StreamSplit(0.5))
        apart = max(apart, difference(answers_of(generate(llm, random_prompts(LENGTHS))), expected))
        assert layers.counters().decode_streamed_bytes % (stored // 16) == 0
        assert layers.counters().decode_streamed_bytes > 0
        assert f"store keys and values as {name}" in "".join(host_layers.describe(layers, num_blocks(llm)))
    with small_blocks(model, **host(HOST)) as llm:
        unrounded = answers_of(generate(llm, random_prompts(LENGTHS)))
    rounding = distance(found, unrounded)
    assert 10 * apart < rounding < {"int8": 0.03, "fp8_e4m3": 0.1, "fp8_e5m2": 0.2}[name], (apart, rounding)


@pytest.mark.more
def test_numbers_beyond_fp8_are_counted(model: Path) -> None:
    with small_blocks(model, **host(HOST, host_kv_dtype="fp8_e4m3")) as llm:
        for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values():
            layer._k_scale_float, layer._v_scale_float = 1e-6, 1.0
        generate(llm, random_prompts((40,)), max_tokens=3)
        layers = host_layers_in(llm)
        saturated = layers.group.saturated.tolist()
        assert min(saturated) > 0, "prompts are rounded by the device and answers by the CPU, and both count"
        # Nearly all keys: 42 tokens of 2 heads of 64 numbers in 3 layers.
        assert 0.8 * 42 * 2 * 64 * 3 < sum(saturated) <= 42 * 2 * 64 * 3
        assert of_host_layers(layers).saturated_numbers == sum(saturated)


def test_two_ways_to_store_8_bits_are_refused(model: Path) -> None:
    both = host(2, host_kv_dtype="int8")
    config = EngineArgs(str(model), max_model_len=64, kv_cache_dtype="fp8_e4m3", **both)
    with pytest.raises(Exception, match="host_kv_dtype is int8, but --kv-cache-dtype fp8_e4m3 already stores"):
        host_plan.plan_without_gpu(config.create_engine_config())


def test_an_unknown_dtype_is_refused(model: Path) -> None:
    config = EngineArgs(str(model), max_model_len=64, **host(2, host_kv_dtype="int4"))
    with pytest.raises(Exception, match=r"host_kv_dtype = 'int4' is not valid .*'fp8_e4m3', 'fp8_e5m2' or 'int8'"):
        config.create_engine_config()
