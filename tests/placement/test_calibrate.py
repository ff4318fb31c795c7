"""The measurement of the rates, on a tiny pool."""

from __future__ import annotations

import dataclasses

import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.placement import calibrate
from fastattention_vllm.placement.host_attention import HostAttention, HostLayerGroup
from fastattention_vllm.placement.link import LocalLink
from tests.placement.scenario import Model


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
