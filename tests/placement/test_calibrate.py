"""The share of the link from rates, and the rates themselves on the smallest of pools."""

from __future__ import annotations

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


@given(RATE, RATE, RATE)
def test_the_share_is_the_best_that_the_memory_allows(memory: float, processor: float, link: float) -> None:
    """With a part s for the link, both are done when the slower is, and no sooner than the memory has given it all."""
    rates = Rates(memory, processor, link)
    share = calibrate.share(rates)
    assert 0 <= share < 1
    if processor >= ENOUGH * memory:
        assert share == 0
        return

    def seconds(part: float) -> float:
        return max(part / link, (1 - part) / processor, 1 / memory)

    best = min(seconds(part / 1000) for part in range(1000))
    assert seconds(share) <= best * (1 + 1e-9)


def test_all_three_rates_are_measured_without_a_trace() -> None:
    model = Model(page_size=16, window=30)
    cache = torch.zeros(500, model.num_kv_heads, model.page_size, 2 * model.head_size)
    layer = HostAttention(Lane(LocalLink(), cpu), model, cache, model.window)
    rates = calibrate.measure(layer, model.num_heads, torch.float32)
    assert min(rates.memory, rates.cpu, rates.link) > 0
    assert max(rates.memory, rates.cpu, rates.link) < float("inf")
    assert not cache.any()
    conveyor = layer.lane.conveyor
    assert sorted(conveyor.free) == [0, 1]
    assert not conveyor.coming
