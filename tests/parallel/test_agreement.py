"""What some rank cannot do, no rank does, and none waits for it. Ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fastattention_vllm.parallel.agreement import RankFailed, agreed
from fastattention_vllm.parallel.shared_segment import Exchange

STEPS = 3


class World:
    """Exchanges between threads. A rank that waits for another in vain fails with BrokenBarrierError."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=10)

    def exchange_of(self, rank: int) -> Exchange:
        def exchange(value: Any) -> list[Any]:
            self.values[rank] = value
            self.barrier.wait()
            found = list(self.values)
            self.barrier.wait()
            return found

        return exchange

    def run(self, body: Callable[[int, Exchange], object]) -> list[object]:
        """What each rank returns or raises."""

        def one(rank: int) -> object:
            try:
                return body(rank, self.exchange_of(rank))
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self.values)) as ranks:
            return list(ranks.map(one, range(len(self.values))))


def steps(rank: int, exchange: Exchange, failing: dict[int, int]) -> list[Any]:
    found = []
    for step in range(STEPS):
        if failing.get(rank) == step:
            raise MemoryError(f"no memory in step {step}\nand more")
        found.append(exchange((rank, step)))
    if failing.get(rank) == STEPS:
        raise MemoryError("no memory at the end")
    return found


def test_without_a_failure_all_get_all_values() -> None:
    def body(rank: int, exchange: Exchange) -> object:
        with agreed(exchange) as among:
            return steps(rank, among, {})

    assert World(3).run(body) == [[[(0, step), (1, step), (2, step)] for step in range(STEPS)]] * 3


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("failing", [{0: 0}, {1: 1}, {2: STEPS}, {0: 1, 2: 1}, {0: 2, 1: 1}, {0: 0, 1: 0, 2: 0}])
def test_a_failure_ends_all_ranks(failing: dict[int, int], nested: bool) -> None:
    def body(rank: int, exchange: Exchange) -> object:
        with agreed(exchange) as outer:
            if not nested:
                return steps(rank, outer, failing)
            outer(None)
            with agreed(outer) as inner:
                return steps(rank, inner, failing)

    first = min(failing.values())
    for rank, found in enumerate(World(3).run(body)):
        if failing.get(rank) == first:
            assert isinstance(found, MemoryError)
        else:
            assert isinstance(found, RankFailed)
            guilty = min(one for one, step in failing.items() if step == first)
            at = "at the end" if first == STEPS else f"in step {first}"
            assert str(found) == f"rank {guilty} cannot go on: no memory {at}"


def test_ranks_go_on_together_after_a_failure_that_they_can_do_without() -> None:
    def body(rank: int, exchange: Exchange) -> object:
        try:
            with agreed(exchange) as among:
                steps(rank, among, {1: 1})
        except (MemoryError, RankFailed):
            pass
        return exchange(rank)

    assert World(3).run(body) == [[0, 1, 2]] * 3


def test_the_error_of_the_others_can_be_chosen_and_one_without_a_text_has_its_name() -> None:
    def body(rank: int, exchange: Exchange) -> None:
        with agreed(exchange, ValueError):
            assert rank, ""

    own, other = World(2).run(body)
    assert isinstance(own, AssertionError)
    assert isinstance(other, ValueError)
    assert str(other).startswith("rank 0 cannot go on: ")


def test_a_broken_exchange_is_not_tried_again() -> None:
    calls = []

    def broken(value: Any) -> list[Any]:
        calls.append(value)
        raise ConnectionError("closed by peer")

    with pytest.raises(ConnectionError), agreed(broken) as among:
        among(1)
    assert len(calls) == 1
