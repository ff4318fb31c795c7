"""The measurement of the rates, on a tiny pool."""

from __future__ import annotations

import dataclasses
import time

import pytest
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


@pytest.mark.parametrize("tokens", [1, 5])
def test_the_rates_are_those_of_so_many_tokens(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU alone, and beside copies."""
    model = Model(page_size=16)
    cache = torch.zeros(50, model.num_kv_heads, model.page_size, 2 * model.head_size)
    layer = HostAttention(HostLayerGroup(LocalLink(), cpu), model, cache)
    problems, run = [], cpu.run
    monkeypatch.setattr(calibrate.cpu_kernels, "run", lambda problem: (problems.append(problem), run(problem)))
    calibrate.measure(layer, model.num_heads, torch.float32, tokens)
    assert len(problems) == 2 * calibrate.ROUNDS + 1
    for problem in problems:
        assert problem.query.shape == (tokens, model.num_heads, model.head_size)
        assert problem.query_start_loc.tolist() == [0, tokens]


def waits(slowness: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a rank waits for others if its CPU attention takes so many seconds longer."""
    model = Model(page_size=16)
    cache = torch.zeros(500, model.num_kv_heads, model.page_size, 2 * model.head_size)
    layer = HostAttention(HostLayerGroup(LocalLink(), cpu), model, cache, model.window)
    met: list[None] = []
    with monkeypatch.context() as patch:
        run = cpu.run
        patch.setattr(calibrate.cpu_kernels, "run", lambda problem: (time.sleep(slowness), run(problem)))
        calibrate.measure(layer, model.num_heads, torch.float32, together=lambda: met.append(None))
    return len(met)


def test_ranks_wait_for_each_other_before_each_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often on a fast rank as on a slow one, or one would wait forever."""
    assert waits(0.0, monkeypatch) == waits(0.002, monkeypatch) > 10
