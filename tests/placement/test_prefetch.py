"""The prefetcher: order, buffers, and that each range is given only to the visit for which it was fetched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.placement import prefetch
from fastattention_vllm.placement.link import LocalLink
from fastattention_vllm.placement.prefetch import KvRange, Prefetcher, PrefetchError, Visit


@dataclass(eq=False)
class Step:
    """The blocks that each layer reads, range by range."""

    blocks: list[list[list[int]]]
    independent: bool = True


class Layer:
    """Block b of layer n holds the number 100 n + b."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.cache = torch.arange(10.0).view(10, 1, 1, 1) + 100 * number
        self.written: Any = f"written {number}"
        self.kept: dict[int, list[KvRange]] = {}

    def ranges(self, step: Step) -> Sequence[KvRange]:
        made = [KvRange(0, len(blocks), torch.tensor(blocks)) for blocks in step.blocks[self.number]]
        return self.kept.setdefault(id(step), made)


class CheckingLink(LocalLink):
    """Checks the prefetcher's calls. Copies happen at once, or only when they are waited for."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once
        self.points = iter(range(1, 10**6))
        self.in_use: set[int] = set()
        """Addresses of the buffers."""
        self.over: dict[int, int] = {}
        """By address, the last point before the end of a buffer's last use."""
        self.pending: dict[int, Callable[[], None]] = {}
        self.after: list[list[Any]] = []
        self.fetched: list[int] = []
        """The block numbers that the fetches so far have requested."""

    def mark(self) -> Any:
        self.last = next(self.points)
        return self.last

    def fetch(self, cache: torch.Tensor, blocks: torch.Tensor, target: torch.Tensor, after: Sequence[Any]) -> Any:
        address = target.data_ptr()
        assert address not in self.in_use
        if address in self.over:
            over = isinstance(after[-1], int) and after[-1] > self.over[address]
            assert over, "the copy must not begin before the last use of its buffer is over"
        self.after.append(list(after))
        self.fetched += cache[blocks].flatten().int().tolist()
        fetch, point = super().fetch, self.mark()
        self.pending[point] = lambda: fetch(cache, blocks, target, ())
        if self.at_once:
            self.pending[point]()
        return point

    def wait(self, point: Any) -> None:
        self.pending.pop(point, lambda: None)()


class Pass:
    """Layers that visit the prefetcher and check the ranges they get."""

    def __init__(self, at_once: bool = True, layers: int = 3) -> None:
        self.link = CheckingLink(at_once)
        self.prefetcher = Prefetcher(self.link)
        self.layers = [Layer(number) for number in range(layers)]
        for layer in self.layers:
            self.prefetcher.reserve(layer.cache)

    def visit(self, layer: Layer, step: Step, upcoming: Sequence[tuple[Layer, Step]]) -> None:
        prefetcher, link = self.prefetcher, self.link
        prefetcher.begin(layer, step, lambda: [Visit(*following) for following in upcoming])
        if not step.independent:
            prefetcher.fetch_now(["in its turn"])
        for wanted in layer.ranges(step):
            number, blocks = prefetcher.take(layer, step, wanted)
            address = blocks.data_ptr()
            link.in_use.add(address)
            found = blocks[: len(wanted.blocks)].flatten().tolist()
            assert found == [100 * layer.number + block for block in wanted.blocks.tolist()]
            link.in_use.remove(address)
            link.over[address] = link.last
            prefetcher.give_back(number)
        prefetcher.end()

    def assert_at_rest(self) -> None:
        assert sorted(self.prefetcher.free) == [0, 1]
        assert not self.prefetcher.coming
        assert not self.prefetcher.waiting
        assert not self.prefetcher.expected


@pytest.fixture(autouse=True)
def four_blocks_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "STAGING_BYTES", 4 * 4)


RANGES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=4)
STEPS = st.builds(Step, st.lists(RANGES, min_size=3, max_size=3), st.sampled_from([True, True, False]))


@given(st.lists(STEPS, min_size=1, max_size=3), st.booleans(), st.booleans(), st.data())
def test_every_visit_gets_its_own_ranges(steps: list[Step], at_once: bool, foretold: bool, data: st.DataObject) -> None:
    """Passes with several steps, in any order of the visits, and with a forecast that is right, wrong or incomplete."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch, "STAGING_BYTES", 4 * 4)
        scenario = Pass(at_once)
    pairs = [(layer, step) for layer in scenario.layers for step in steps]
    for _ in range(2):
        visits = data.draw(st.permutations(pairs))
        for number, (layer, step) in enumerate(visits):
            rest = visits[number:]
            wrong = [rest[0], *data.draw(st.permutations(pairs))]
            scenario.visit(layer, step, rest if foretold else wrong[: data.draw(st.integers(1, len(wrong)))])
        scenario.prefetcher.discard()
        scenario.assert_at_rest()


def test_a_pass_is_fetched_in_the_order_of_its_visits_whatever_their_steps_are() -> None:
    scenario = Pass()
    first, second, third = scenario.layers
    one, other = Step([[[1], [2]], [], [[5]]]), Step([[], [[3], [4]], []])
    visits = [(first, one), (second, other), (third, one)]
    for number, (layer, step) in enumerate(visits):
        scenario.visit(layer, step, visits[number:])
    assert scenario.link.fetched == [1, 2, 103, 104, 205]
    assert len({after[0] for after in scenario.link.after}) == 1, "the pass must begin once"
    scenario.assert_at_rest()


def test_one_range_is_copied_while_another_is_in_use() -> None:
    scenario = Pass(at_once=False, layers=1)
    (layer,) = scenario.layers
    step = Step([[[0], [1], [2], [3]]])
    scenario.prefetcher.begin(layer, step, lambda: [Visit(layer, step)])
    assert len(scenario.link.pending) == 2
    number, _ = scenario.prefetcher.take(layer, step, layer.ranges(step)[0])
    assert len(scenario.link.pending) == 1
    scenario.prefetcher.give_back(number)
    assert len(scenario.link.pending) == 2


def test_a_range_of_another_layer_step_or_place_is_an_error() -> None:
    for taken in ("layer", "step", "range"):
        scenario = Pass(layers=2)
        layer, other = scenario.layers
        step, another = Step([[[1], [2]], [[1]]]), Step([[[1]], [[1]]])
        wanted = layer.ranges(step)
        scenario.prefetcher.begin(layer, step, lambda layer=layer, step=step: [Visit(layer, step)])
        arguments = {
            "layer": (other, step, other.ranges(step)[0]),
            "step": (layer, another, layer.ranges(another)[0]),
            "range": (layer, step, wanted[1]),
        }
        with pytest.raises(PrefetchError, match="the answer would have been wrong"):
            scenario.prefetcher.take(*arguments[taken])


def test_a_layer_that_leaves_ranges_unused_is_an_error() -> None:
    scenario = Pass(layers=1)
    (layer,) = scenario.layers
    step = Step([[[1], [2], [3]]])
    scenario.prefetcher.begin(layer, step, lambda: [Visit(layer, step)])
    scenario.prefetcher.give_back(scenario.prefetcher.take(layer, step, layer.ranges(step)[0])[0])
    with pytest.raises(PrefetchError, match="left 2 of its ranges unused"):
        scenario.prefetcher.end()


def test_a_forecast_that_begins_with_another_layer_is_an_error() -> None:
    scenario = Pass(layers=2)
    layer, other = scenario.layers
    step = Step([[], []])
    with pytest.raises(PrefetchError, match="is not for the layer that is being computed"):
        scenario.prefetcher.begin(layer, step, lambda: [Visit(other, step)])


def test_a_second_batch_of_a_layer_waits_for_the_first() -> None:
    """Two microbatches: what the first one writes may be context of the second."""
    scenario = Pass(layers=2)
    layer, other = scenario.layers
    one, two = Step([[[1]], [[1]]]), Step([[[2]], [[2]]])
    visits = [(layer, one), (layer, two), (other, one), (other, two)]
    scenario.prefetcher.begin(layer, one, lambda: [Visit(*visit) for visit in visits])
    assert scenario.link.fetched == [1]
    scenario.prefetcher.discard()
    for number, visit in enumerate(visits):
        scenario.visit(*visit, visits[number:])
    assert scenario.link.fetched == [1, 1, 2, 101, 102]


def test_there_are_two_buffers_as_large_as_the_largest_block() -> None:
    taken: list[int] = []

    class Counting(LocalLink):
        def staging(self, size: int) -> torch.Tensor:
            taken.append(size)
            return super().staging(size)

    prefetcher = Prefetcher(Counting())
    for elements in (2, 1, 3):
        prefetcher.reserve(torch.zeros(5, 1, 1, elements))
    assert taken == [16, 16]
    assert prefetcher.table.tolist() == [[0, 1, 2, 3]]
    prefetcher.reserve(torch.zeros(5, 1, 2, 4))
    assert taken == [16, 16, 32, 32]
    assert [buffer.nbytes for buffer in prefetcher.buffers] == [32, 32]
