"""The stream fraction for given rates, and the measurement of the rates on a tiny pool."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.placement import calibrate
from fastattention_vllm.placement.calibrate import ENOUGH, Rates
from fastattention_vllm.placement.host_attention import MIN_SPLIT_BYTES, HostAttention, HostLayerGroup, StreamSplit
from fastattention_vllm.placement.link import LocalLink
from tests.placement.scenario import Model

RATE = st.floats(1e6, 1e12)


@given(RATE, RATE, RATE, RATE, RATE, st.integers(1, 1 << 50))
def test_link_and_cpu_finish_at_the_same_time(
    memory: float, alone: float, link: float, cpu: float, up: float, size: int
) -> None:
    split = calibrate.stream_split(Rates(memory, alone, link, cpu, up))
    if alone >= ENOUGH * memory:
        assert split == StreamSplit(0.0)
        return
    by_link = split.of(size) * size
    if size < MIN_SPLIT_BYTES:
        assert by_link == 0, "streaming must not be worth it"
    elif size <= split.head_start:
        assert by_link == size, "it arrives before the CPU begins"
    else:
        assert (by_link - split.head_start) / up == pytest.approx(
            (size - by_link) / cpu, abs=1 / min(up, cpu), rel=1e-6
        )


def test_a_configured_fraction_applies_to_every_size() -> None:
    for size in (0, 1, MIN_SPLIT_BYTES - 1, 1 << 40):
        assert StreamSplit(0.3).of(size) == pytest.approx(0.3)


def test_measuring_the_rates_leaves_the_cache_unchanged() -> None:
    model = Model(page_size=16, window=30)
    cache = torch.zeros(500, model.num_kv_heads, model.page_size, 2 * model.head_size)
    layer = HostAttention(HostLayerGroup(LocalLink(), cpu), model, cache, model.window)
    rates = calibrate.measure(layer, model.num_heads, torch.float32)
    assert min(rates.memory, rates.cpu, rates.link, rates.cpu_beside_link) > 0
    assert max(dataclasses.astuple(rates)) < float("inf")
    assert rates.link_beside_cpu >= 0, "here the copies finish before the CPU begins"
    assert not cache.any()
    prefetcher = layer.group.prefetcher
    assert sorted(prefetcher.free) == [0, 1]
    assert not prefetcher.coming
