"""The share of the link from rates, and the rates themselves on the smallest of pools."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.attention import cpu
from fastattention_vllm.placement import calibrate
from fastattention_vllm.placement.calibrate import ENOUGH, Rates
from fastattention_vllm.placement.cooperative import HostAttention, Lane
from fastattention_vllm.placement.link import LocalLink
from tests.placement.test_cooperative import Model

RATE = st.floats(1e6, 1e12)


@given(RATE, RATE, RATE, RATE, RATE)
def test_both_are_done_at_the_same_time(memory: float, alone: float, link: float, cpu: float, up: float) -> None:
    share = calibrate.share(Rates(memory, alone, link, cpu, up))
    assert 0 <= share < 1
    if alone >= ENOUGH * memory:
        assert share == 0
    else:
        assert share / up == pytest.approx((1 - share) / cpu)


def test_all_rates_are_measured_without_a_trace() -> None:
    model = Model(page_size=16, window=30)
    cache = torch.zeros(500, model.num_kv_heads, model.page_size, 2 * model.head_size)
    layer = HostAttention(Lane(LocalLink(), cpu), model, cache, model.window)
    rates = calibrate.measure(layer, model.num_heads, torch.float32)
    assert min(rates.memory, rates.cpu, rates.link, rates.cpu_beside_link) > 0
    assert max(dataclasses.astuple(rates)) < float("inf")
    assert rates.link_beside_cpu >= 0, "here the copies are done before the CPU begins"
    assert not cache.any()
    conveyor = layer.lane.conveyor
    assert sorted(conveyor.free) == [0, 1]
    assert not conveyor.coming
