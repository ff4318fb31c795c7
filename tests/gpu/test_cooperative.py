"""A host layer's steps on a real GPU against float64 attention, with its transfers, streams and kernels."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastattention_vllm.placement import calibrate, host_attention, host_memory, link, prefetch
from fastattention_vllm.placement.host_attention import HostLayerGroup
from fastattention_vllm.placement.pinning import CudaPinning
from fastattention_vllm.placement.stream_split import StreamSplit
from tests.placement.scenario import Model, Scenario, some_steps

pytestmark = pytest.mark.usefixtures("exact_weights")
UNWRITTEN = 50.0
"""Filler of unused memory. Not NaN, because FlashAttention multiplies what follows the last token by zero."""

MODELS = st.builds(
    Model,
    num_heads=st.sampled_from([4, 8]),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    head_size=st.sampled_from([64, 128]),
    page_size=st.sampled_from([16, 128]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    window=st.sampled_from([None, None, 1, 30, 200]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
)


def scenario_of(model: Model, share: float, seed: int, kernels: str = "flash", resident_rows: int = 0) -> Scenario:
    module = {"volta": "volta.kernels"}.get(kernels, kernels)
    device = importlib.import_module(f"fastattention_vllm.attention.{module}")
    group = HostLayerGroup(link.CudaLink(torch.device("cuda:0")), device, stream_split=StreamSplit(share))
    more: dict[str, Any] = {"unwritten": UNWRITTEN, "new_cache": pinned, "resident_rows": resident_rows}
    return Scenario(model, 3, 400, group, seed, device="cuda:0", **more)


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    memory, _ = host_memory.commit(torch.Size(shape).numel() * dtype.itemsize, pin=CudaPinning())
    return memory.view(dtype).view(shape)


@settings(max_examples=60)
@given(
    kernels=st.sampled_from(["flash", "volta"]),
    model=MODELS.filter(lambda model: model.num_heads % model.num_kv_heads == 0),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    blocks_per_part=st.sampled_from([1, 3, 40]),
    few_runs=st.sampled_from([0, 32]),
    seed=st.integers(0, 1000),
)
def test_steps_equal_attention_over_the_whole_history(
    kernels: str, model: Model, share: float, blocks_per_part: int, few_runs: int, seed: int
) -> None:
    """Parts of any size, fetched by the copy engine (few runs of blocks) or by a gather kernel (many)."""
    assume(kernels == "flash" or model.dtype == torch.float16)
    with pytest.MonkeyPatch.context() as patch:
        block = 2 * model.page_size * model.num_kv_heads * model.head_size * model.dtype.itemsize
        patch.setattr(prefetch, "STAGING_BYTES", blocks_per_part * block)
        patch.setattr(host_attention, "MIN_STREAMED_BYTES", 1)
        patch.setattr(link, "FEW_RUNS", few_runs)
        some_steps(
            scenario_of(model, share, seed, kernels), random.Random(seed), rounds=5, chunk=100, firsts=(3, 60, 400)
        )


@settings(max_examples=40)
@given(
    kernels=st.sampled_from(["flash", "volta"]),
    model=MODELS.filter(lambda model: model.num_heads % model.num_kv_heads == 0 and model.window is None),
    share=st.sampled_from([0.0, 0.4]),
    rows=st.sampled_from([1, 9, 40, 400]),
    seed=st.integers(0, 1000),
)
def test_steps_with_copies_equal_attention_over_the_whole_history(
    kernels: str, model: Model, share: float, rows: int, seed: int
) -> None:
    """Some blocks of host layers lie on the GPU, too."""
    assume(kernels == "flash" or model.dtype == torch.float16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_attention, "MIN_STREAMED_BYTES", 1)
        scenario = scenario_of(model, share, seed, kernels, rows)
        some_steps(scenario, random.Random(seed), rounds=5, chunk=100, firsts=(3, 60, 400))


def test_sinks() -> None:
    """Sinks are tested in bf16 because FlashAttention supports them only there."""
    for share in (0.0, 0.5):
        model = Model(8, 2, 64, 16, torch.bfloat16, has_sinks=True)
        some_steps(scenario_of(model, share, 0), random.Random(0), rounds=5, chunk=100, firsts=(3, 60, 400))


def test_rates_are_measured() -> None:
    scenario = scenario_of(Model(8, 2, 128, 128, torch.float16), 0.0, 0)
    rates = calibrate.measure(scenario.layers[0], 8, torch.float16)
    assert 0 < rates.link_beside_cpu < 2 * rates.link
    assert 0 < rates.cpu_beside_link < 2 * rates.cpu
