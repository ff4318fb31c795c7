"""A rank that cannot start host layers ends the start of all ranks, at once. Two processes with vLLM's world group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.host_layers import ranks as world
from fastattention_vllm.placement import calibrate, host_pool
from fastattention_vllm.placement.host_attention import HostAttention, HostLayerGroup
from fastattention_vllm.placement.host_pool import PageShape
from fastattention_vllm.placement.link import LocalLink
from tests.parallel.ranks import Raised, Ranks
from tests.placement.scenario import Model, Pins

PROMPTLY = 30.0
"""Seconds, of gloo's 1800."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        started.run(join)
        yield started


def join(rank: int) -> None:
    from vllm.distributed import parallel_state

    parallel_state._WORLD = parallel_state.init_world_group([0, 1], rank, "gloo")


def no_memory(*arguments: Any, **named: Any) -> Any:
    raise MemoryError("the host layers' KV cache needs 9.00 GiB, but only 4.00 of 9.00 GiB could be allocated")


def no_kernels(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError("the CPU kernels have stopped")


FAILURES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "pool": (host_pool, "create", no_memory),
    "opening": (host_layers.HostLayers, "_divide_copies", no_kernels),
    "measurement": (calibrate, "plain_read_rate", no_kernels),
    "end": (host_layers, "describe", no_kernels),
}


def allocate(rank: int, failure: str, failing: int) -> float:
    """``HostLayers.allocate`` with one small layer. Returns the seconds that it took."""
    replaced = (
        host_layers.page_shape,
        host_layers.describe,
        *(getattr(place, name) for place, name, _ in FAILURES.values()),
    )
    group, model = HostLayerGroup(LocalLink(), cpu), Model(num_heads=4, num_kv_heads=2, head_size=32, page_size=16)
    impl = SimpleNamespace(num_heads=4, inner=SimpleNamespace(host_window=None), attention=None)

    def opened(cache: torch.Tensor, copies: torch.Tensor | None = None) -> None:
        impl.attention = HostAttention(group, model, cache)

    impl.open = opened
    host_layers.page_shape = lambda *given: PageShape(64, 16, 2, 32, torch.float32)
    host_layers.describe = lambda *given: []
    if rank == failing:
        place, name, fails = FAILURES[failure]
        setattr(place, name, fails)
    found = host_layers.HostLayers(
        SimpleNamespace(pin=Pins()), group, None, {"host": "device"}, 1 << 40, 1024, [], "auto", torch.float32
    )
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    found.specs = {"host": spec}
    config = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["device"], spec)], num_blocks=64)
    began = time.monotonic()
    try:
        found.allocate({"host": SimpleNamespace(impl=impl), "device": None}, config)
    finally:
        taken = time.monotonic() - began
        host_layers.page_shape, host_layers.describe, *originals = replaced
        for (place, name, _), original in zip(FAILURES.values(), originals, strict=True):
            setattr(place, name, original)
    return taken


@pytest.mark.parametrize(
    ("failure", "failing"), [("pool", 0), ("pool", 1), ("opening", 1), ("measurement", 1), ("end", 1)]
)
def test_a_rank_that_cannot_allocate_ends_all(ranks: Ranks, failure: str, failing: int) -> None:
    began = time.monotonic()
    ranks.start(allocate, failure, failing)
    own, other = (ranks.result(rank) for rank in (failing, 1 - failing))
    assert time.monotonic() - began < PROMPTLY
    assert isinstance(own, Raised)
    assert isinstance(other, Raised)
    assert other.kind == "Refusal"
    assert other.message.startswith(f"rank {failing} cannot go on: ")
    assert other.message.endswith(own.message)
    assert "rank" not in own.message


def test_ranks_that_can_allocate_do(ranks: Ranks) -> None:
    assert all(isinstance(seconds, float) for seconds in ranks.run(allocate, "pool", -1))


def decide(rank: int) -> list[float]:
    with world.together(), world.together():
        world.wait_for_ranks()
        return world.smallest(1.5 - rank, 2 + rank)


def test_all_ranks_take_the_smallest_numbers(ranks: Ranks) -> None:
    assert ranks.run(decide) == [[0.5, 2.0]] * 2


def refuse_before_the_limits(rank: int) -> None:
    """As ``set_up`` does: a rank refuses before the others ask for the smallest limits."""
    with world.together():
        if rank:
            raise ValueError("this machine's CPUs are not supported")
        world.smallest(1.0)


def test_a_rank_that_refuses_before_the_first_exchange(ranks: Ranks) -> None:
    ranks.start(refuse_before_the_limits)
    assert [ranks.result(rank).message for rank in (0, 1)] == [
        "rank 1 cannot go on: this machine's CPUs are not supported",
        "this machine's CPUs are not supported",
    ]
    assert ranks.run(decide) == [[0.5, 2.0]] * 2, "nothing of the failure may be left"


def test_one_rank_alone_needs_no_world() -> None:
    with world.together():
        assert world.smallest(3, 4.5) == [3.0, 4.5]
