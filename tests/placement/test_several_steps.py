"""Several metadata objects in one forward pass: no layer uses data that was fetched for another step.

vLLM creates one metadata object per attention group (groups differ in the number of query heads too) and one per
microbatch. The batches contain a prompt's second chunk (whose context is copied to the device), decode steps that the
device shares with the CPU, and one prompt split into two microbatches, the second of which reads what the first writes
in the same pass.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.placement import host_attention, prefetch
from fastattention_vllm.placement.prefetch import Visit
from fastattention_vllm.placement.step import Step
from tests.placement.scenario import Model, Scenario, Work
from tests.placement.test_host_attention import LINKS, scenario_of

pytestmark = pytest.mark.usefixtures("exact_weights")

Turn = tuple[int, int]
"""A layer and a batch."""
NUM_LAYERS = 3
ONE_AFTER_THE_OTHER = [(layer, batch) for batch in range(2) for layer in range(NUM_LAYERS)]  # A0 A1 A2 B0 B1 B2
IN_TURNS = [(layer, batch) for layer in range(NUM_LAYERS) for batch in range(2)]  # A0 B0 A1 B1 A2 B2
FORECASTS = ("none", "right", "wrong", "short")


@pytest.fixture(autouse=True)
def two_blocks_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    block = 2 * model.page_size * model.num_kv_heads * model.head_size * model.dtype.itemsize
    monkeypatch.setattr(prefetch, "STAGING_BYTES", 2 * block)
    monkeypatch.setattr(host_attention, "MIN_STREAMED_BYTES", 1)


def two_batches(scenario: Scenario, kind: str) -> list[list[Work]]:
    """Both batches have contexts in the caches, written by earlier passes."""
    one, other, third = (scenario.request(tokens) for tokens in (70, 55, 40))
    scenario.attend([scenario.work(one, 30), scenario.work(other, 25), scenario.work(third, 20)])
    if kind == "prompts":
        return [[scenario.work(one, 20)], [scenario.work(other, 12), scenario.work(third, 9)]]
    if kind == "decoding":
        return [[scenario.work(one, 1), scenario.work(third, 2)], [scenario.work(other, 1)]]
    if kind == "a prompt and decoding":
        return [[scenario.work(one, 20), scenario.work(third, 1)], [scenario.work(other, 3)]]
    if kind == "a new prompt cut in two":
        new = scenario.request(40)
        return [[scenario.work(new, 20)], [scenario.work(new, 15)]]
    assert kind == "one prompt cut in two"
    return [[scenario.work(one, 20)], [scenario.work(one, 15), scenario.work(third, 1)]]


KINDS = ("prompts", "decoding", "a prompt and decoding", "one prompt cut in two", "a new prompt cut in two")


def forward(
    scenario: Scenario,
    turns: Sequence[Turn],
    works: Sequence[list[Work]],
    steps: Sequence[Step],
    forecast: str,
    seed: int,
) -> None:
    """One pass; the result of each turn is compared with the oracle."""
    numbers = random.Random(seed)
    for number, (layer, batch) in enumerate(turns):
        scenario.visit(
            layer, steps[batch], works[batch], upcoming=says(scenario, steps, turns[number:], forecast, numbers)
        )
    if forecast == "right":
        scenario.assert_at_rest()
    scenario.group.prefetcher.discard()
    scenario.assert_at_rest()


def says(
    scenario: Scenario, steps: Sequence[Step], rest: Sequence[Turn], forecast: str, numbers: random.Random
) -> Callable[[], Iterator[Visit]] | None:
    """The forecast given to the prefetcher: none (all layers of the group then take one step), or some turns."""
    if forecast == "none":
        return None
    said = list(rest)
    if forecast == "wrong":
        said = [rest[0], *((numbers.randrange(NUM_LAYERS), numbers.randrange(2)) for _ in range(5))]
    elif forecast == "short":
        said = said[: numbers.randint(1, 2)]
    return lambda: (Visit(scenario.layers[layer], steps[batch]) for layer, batch in said)


def scenario_with(share: float, link: str, **more: Any) -> Scenario:
    return scenario_of(Model(**more), NUM_LAYERS, 200, share, 0, link)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turns", [ONE_AFTER_THE_OTHER, IN_TURNS], ids=["A0 A1 B0 B1", "A0 B0 A1 B1"])
@pytest.mark.parametrize("forecast", FORECASTS)
def test_microbatches(kind: str, turns: list[Turn], forecast: str) -> None:
    for link in LINKS:
        for share in (0.0, 0.6):
            scenario = scenario_with(share, link)
            works = two_batches(scenario, kind)
            forward(scenario, turns, works, [scenario.divide(batch) for batch in works], forecast, seed=0)


@pytest.mark.parametrize("forecast", FORECASTS)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("kind", KINDS)
def test_groups_by_number_of_query_heads_have_separate_steps(kind: str, link: str, forecast: str) -> None:
    """One batch, split once for each group; the middle layer belongs to the other group."""
    scenario = scenario_of(Model(), NUM_LAYERS, 200, 0.6, 0, link, num_heads=[4, 6, 4])
    (works, _) = two_batches(scenario, kind)
    steps = [scenario.divide(works) for _ in range(2)]
    forward(scenario, [(0, 0), (1, 1), (2, 0)], [works, works], steps, forecast, seed=0)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    first=st.lists(st.booleans(), min_size=2 * NUM_LAYERS, max_size=2 * NUM_LAYERS),
    forecast=st.sampled_from(FORECASTS),
    link=st.sampled_from(LINKS),
    share=st.sampled_from([0.0, 0.6]),
    window=st.sampled_from([None, 5, 30]),
    seed=st.integers(0, 1000),
)
def test_microbatches_in_any_order(
    kind: str, first: list[bool], forecast: str, link: str, share: float, window: int | None, seed: int
) -> None:
    """Each batch visits the layers in order, and the first batch visits each layer first, as causality requires."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_attention, "MIN_STREAMED_BYTES", 1)
        scenario = scenario_with(share, link, window=window)
        works = two_batches(scenario, kind)
        turns: list[Turn] = []
        at = [0, 0]
        for wants_first in [*first, *[True] * NUM_LAYERS, *[False] * NUM_LAYERS]:
            batch = 0 if at[0] < NUM_LAYERS and (wants_first or at[1] == at[0]) else 1
            if at[batch] < NUM_LAYERS:
                turns.append((at[batch], batch))
                at[batch] += 1
        assert len(turns) == 2 * NUM_LAYERS
        forward(scenario, turns, works, [scenario.divide(batch) for batch in works], forecast, seed)
