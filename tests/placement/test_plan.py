"""Plans compared with every other possible plan, and with the paper's formula."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastattention_vllm.placement.kv_size import KvSize
from fastattention_vllm.placement.plan import (
    LayerPlacement,
    Layers,
    Limits,
    PlacementError,
    all_splits,
    indices_text,
    longest_request,
    plan,
    spread,
    why_too_long,
)

GIB = 1 << 30
PLENTY = Limits(device_bytes=1 << 50, host_bytes=1 << 50, tokens=1000)


@st.composite
def models(draw: st.DrawFn, most: int = 12, fixed: bool = True) -> tuple[Layers, KvSize]:
    """Layers of one or two kinds in any order, some of which may have to stay on the device."""
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=most))
    full = tuple(index for index, kind in enumerate(kinds) if kind)
    windowed = tuple(index for index, kind in enumerate(kinds) if not kind)
    stay = draw(st.sets(st.sampled_from(range(len(kinds))), max_size=2)) if fixed else set()
    size = KvSize(
        block_size=draw(st.sampled_from([8, 16])),
        bytes_per_block=1024,
        full_layers=len(full),
        windowed_layers=len(windowed),
        window=draw(st.integers(1, 500)),
        tokens_per_step=draw(st.integers(1, 300)),
        state_layers=draw(st.sampled_from([0, 0, 5, 48])),
        state_blocks=draw(st.integers(1, 5)),
        draft_layers=draw(st.integers(0, 2)),
    )
    return Layers(full, windowed, frozenset(stay)), size


def try_plan(layers: Layers, size: KvSize, wanted: Any, limits: Limits = PLENTY) -> LayerPlacement | None:
    try:
        return plan(layers, size, wanted, limits)
    except PlacementError as error:
        assert_one_sentence(error)
        return None


def assert_one_sentence(error: PlacementError) -> None:
    text = str(error)
    assert text.endswith(".")
    assert "\n" not in text
    assert not re.search(r"\. [A-Z]", text)


def check(placement: LayerPlacement, layers: Layers, size: KvSize) -> None:
    """Properties of every plan."""
    everything = {*layers.full, *layers.windowed}
    assert set(placement.host) | set(placement.device) == everything
    assert len(placement.host) + len(placement.device) == len(everything)
    assert list(placement.host) == sorted(placement.host)
    assert list(placement.device) == sorted(placement.device)
    assert layers.fixed <= set(placement.device)
    for kind in filter(None, (layers.full, layers.windowed)):
        assert set(kind) & set(placement.device)
    for part, of in ((placement.device, placement.device_size), (placement.host, placement.host_size)):
        assert of.full_layers == len(set(part) & set(layers.full))
        assert of.windowed_layers == len(set(part) & set(layers.windowed))
        assert (of.block_size, of.bytes_per_block, of.window) == (size.block_size, size.bytes_per_block, size.window)
    assert size.state_layers or placement.device_size.groups() <= size.groups()
    for name in ("state_layers", "draft_layers"):  # they stay on the device
        assert getattr(placement.device_size, name) == getattr(size, name)
        assert getattr(placement.host_size, name) == 0
    assert (placement.slabs == 0) == (not placement.host)
    assert placement.slabs <= len(placement.host) + 1


def read_bytes(size: KvSize, tokens: int) -> int:
    seen = size.full_layers * tokens + size.windowed_layers * min(size.window, tokens)
    return size.bytes_per_block // size.block_size * seen


def blocks_needed(placement: LayerPlacement, limits: Limits) -> int:
    """Counted as vLLM's block manager does: the blocks of every request, and the null block."""
    size = placement.device_size
    page = size.layers_per_group() * size.bytes_per_block
    return limits.requests * (size.of_request(limits.tokens) - page) // page + 1


def fits(placement: LayerPlacement, limits: Limits) -> bool:
    return placement.max_blocks(limits.device_bytes, limits.host_bytes) >= blocks_needed(placement, limits)


def every_split(layers: Layers, size: KvSize) -> Iterator[LayerPlacement]:
    """All splits by number of host layers of each kind; sizes do not depend on which layers they are."""
    free = [[index for index in kind if index not in layers.fixed] for kind in (layers.full, layers.windowed)]
    for full in range(len(free[0]) + 1):
        for windowed in range(len(free[1]) + 1):
            placement = try_plan(layers, size, [*free[0][:full], *free[1][:windowed]])
            if placement:
                yield placement


LIMITS = st.builds(
    Limits,
    device_bytes=st.one_of(st.integers(0, 1 << 21), st.integers(1 << 21, 1 << 24)),  # enough for some models
    host_bytes=st.one_of(st.integers(0, 1 << 21), st.just(1 << 40)),
    tokens=st.integers(1, 1000),
    requests=st.integers(1, 3),
)


@settings(max_examples=300)
@given(models(), LIMITS)
def test_automatic_plans_fit_and_no_other_split_that_fits_reads_less_from_the_host(
    model: tuple[Layers, KvSize], limits: Limits
) -> None:
    layers, size = model
    least = min(4, size.full_layers) if size.state_layers else 0
    splits = (split for split in every_split(layers, size) if split.device_size.full_layers >= least)
    fitting = [split for split in splits if fits(split, limits)]
    chosen = try_plan(layers, size, "auto", limits)
    assert (chosen is not None) == bool(fitting)
    if chosen:
        check(chosen, layers, size)
        assert fits(chosen, limits)
        least = min(read_bytes(split.host_size, limits.tokens) for split in fitting)
        assert read_bytes(chosen.host_size, limits.tokens) == least
        assert plan(layers, size, "auto", limits) == chosen
        # The decision is passed to other processes as a list of layers.
        assert plan(layers, size, list(chosen.host), PLENTY) == chosen


def test_automatic_plans_move_no_layer_too_many_and_keep_to_the_hosts_limit() -> None:
    layers, size = Layers(tuple(range(4))), KvSize(16, 1000, full_layers=4)
    limits = Limits(size.of_request(1000) // 2, 1 << 40, 1000)
    chosen = plan(layers, size, "auto", limits)
    assert len(chosen.host) == 2
    need = chosen.host_bytes(blocks_needed(chosen, limits))
    assert plan(layers, size, "auto", replace(limits, host_bytes=need)) == chosen
    with pytest.raises(PlacementError, match="limit for host memory"):
        plan(layers, size, "auto", replace(limits, host_bytes=need - 1))


def test_four_full_layers_stay_beside_states_unless_asked() -> None:
    """Qwen3.5-27B with one request of 256K tokens and prefix caching, in GiB as vLLM counts them."""
    layers = Layers(tuple(range(3, 64, 4)))
    size = KvSize(896, 3670016, full_layers=16, state_layers=48, state_blocks=2)
    null = size.null_block()
    assert round((size.of_request(1 << 18) - null) / GIB, 2) == 16.35
    for gib, host in ((16.5, 0), (12.5, 4), (8.4, 8), (4.4, 12)):
        chosen = plan(layers, size, "auto", Limits(int(gib * GIB), 1 << 40, 1 << 18))
        assert len(chosen.host) == host
        assert chosen.slabs == host
    with pytest.raises(PlacementError, match="host_kv_layers 15 leaves the fewest layers on the device"):
        plan(layers, size, "auto", Limits(4 * GIB, 1 << 40, 1 << 18))
    asked = plan(layers, size, 15, PLENTY)
    assert asked.device_size.groups() == 49
    assert round((asked.device_size.of_request(1 << 18) - asked.device_size.null_block()) / GIB, 2) == 1.33


@given(models(), LIMITS)
def test_a_request_that_does_not_fit_is_refused_with_the_longest_that_does(
    model: tuple[Layers, KvSize], limits: Limits
) -> None:
    layers, size = model
    try:
        plan(layers, size, "auto", limits)
    except PlacementError as error:
        text = str(error)
    else:
        assume(False)
    assert f"{limits.requests} request(s) of {limits.tokens} tokens do not fit" in text
    assert "host_kv_gib" in text
    named = re.search(r"--max-model-len (\d+) fits", text)
    longest = int(named[1]) if named else 0
    assert longest < limits.tokens
    if longest:
        assert try_plan(layers, size, "auto", with_tokens(limits, longest))
    if longest + 1 < limits.tokens:
        assert not try_plan(layers, size, "auto", with_tokens(limits, longest + 1))


@given(models(), st.data(), st.integers(1, 5000))
def test_a_length_that_does_not_fit_is_refused_with_what_would(
    model: tuple[Layers, KvSize], data: st.DataObject, tokens: int
) -> None:
    layers, size = model
    others = all_splits(layers, size)
    placement = data.draw(st.sampled_from(others))
    need = placement.device_size.of_request(tokens)
    enough = need - placement.device_size.null_block()
    assert why_too_long(placement, others, tokens, enough) is None
    memory = data.draw(st.integers(0, max(0, enough - 1)))
    text = why_too_long(placement, others, tokens, memory) or ""
    assert bool(text) == (memory < enough)
    if layer := re.search(r"set host_kv_layers to (\d+)", text):
        assert plan(layers, size, int(layer[1]), PLENTY).device_size.of_request(tokens) <= memory
    if text:
        fewer = (other for other in others if not layer or len(other.host) < int(layer[1]))
        assert all(other.device_size.of_request(tokens) > memory for other in fewer)
    if length := re.search(r"pass --max-model-len (\d+) or less", text):
        assert placement.device_size.of_request(int(length[1])) <= memory
        assert int(length[1]) < tokens


@given(models(), LIMITS)
def test_the_longest_request_fits_and_a_longer_one_does_not(model: tuple[Layers, KvSize], limits: Limits) -> None:
    layers, size = model
    longest = longest_request(layers, size, limits)
    assert 0 <= longest <= limits.tokens
    if longest:
        assert try_plan(layers, size, "auto", with_tokens(limits, longest))
    if longest < limits.tokens:
        assert not try_plan(layers, size, "auto", with_tokens(limits, longest + 1))


def with_tokens(limits: Limits, tokens: int) -> Limits:
    return Limits(limits.device_bytes, limits.host_bytes, tokens, limits.requests)


@given(
    num_layers=st.integers(1, 100),
    block_size=st.sampled_from([8, 16, 128]),
    bytes_per_token=st.integers(1, 4096),
    device_bytes=st.integers(0, 1 << 34),
    tokens=st.integers(1, 100_000),
    requests=st.integers(1, 4),
)
def test_one_kind_of_layers_is_placed_by_the_formula_of_the_paper(
    num_layers: int, block_size: int, bytes_per_token: int, device_bytes: int, tokens: int, requests: int
) -> None:
    """L_GPU = min(L, floor(bytes / kappa)), where kappa includes whole blocks and vLLM's null block."""
    size = KvSize(block_size=block_size, bytes_per_block=block_size * bytes_per_token, full_layers=num_layers)
    limits = Limits(device_bytes, 1 << 60, tokens, requests)
    kappa = (requests * math.ceil(tokens / block_size) + 1) * block_size * bytes_per_token
    expected = min(num_layers, device_bytes // kappa)
    placement = try_plan(Layers(tuple(range(num_layers))), size, "auto", limits)
    assert (placement is None) == (expected == 0)
    if placement:
        assert len(placement.device) == expected
        assert len(placement.host) == num_layers - expected
        assert expected <= device_bytes // (requests * tokens * bytes_per_token), "the paper's kappa is smaller"


@given(models(), st.integers(0, 13))
def test_a_number_of_layers_is_met_with_the_least_memory_left_on_the_device(
    model: tuple[Layers, KvSize], count: int
) -> None:
    layers, size = model
    splits = [split for split in every_split(layers, size) if len(split.host) == count]
    placement = try_plan(layers, size, count)
    assert (placement is not None) == bool(splits)
    if placement:
        check(placement, layers, size)
        assert len(placement.host) == count
        long = 1 << 30
        assert read_bytes(placement.device_size, long) == min(read_bytes(s.device_size, long) for s in splits)
        assert plan(layers, size, count, PLENTY) == placement


@given(models(), st.integers(13, 99))
def test_an_impossible_number_is_refused_with_the_possible_ones(model: tuple[Layers, KvSize], count: int) -> None:
    layers, size = model
    with pytest.raises(PlacementError, match=f"host_kv_layers {count} is not possible") as caught:
        plan(layers, size, count, PLENTY)
    assert_one_sentence(caught.value)
    possible = sorted({len(split.host) for split in every_split(layers, size)})
    assert str(caught.value).endswith(f"possible values: {indices_text(possible)}.")


@given(st.integers(1, 80), st.data())
def test_layers_of_one_kind_are_spread_evenly(num_layers: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, num_layers - 1))
    size = KvSize(block_size=16, bytes_per_block=1, full_layers=num_layers)
    device = plan(Layers(tuple(range(num_layers))), size, count, PLENTY).device
    assert len(device) == num_layers - count
    gaps = [b - a for a, b in zip(device, [*device[1:], device[0] + num_layers], strict=True)]
    assert max(gaps) - min(gaps) <= 1
    host = sorted({*range(num_layers)} - {*device})
    between = [b - a for a, b in zip(host, [*host[1:], host[0] + num_layers], strict=True)] if host else [0]
    assert max(between) - min(between) <= 1


@given(st.integers(1, 100), st.data())
def test_spread_chooses_different_layers_in_order(total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, total))
    chosen = spread(range(100, 100 + total), count)
    assert len(set(chosen)) == count
    assert chosen[0] == 100
    assert list(chosen) == sorted(chosen)


@settings(max_examples=200)
@given(models(), st.data())
def test_named_layers_are_taken_or_refused_by_name(model: tuple[Layers, KvSize], data: st.DataObject) -> None:
    layers, size = model
    everything = {*layers.full, *layers.windowed}
    wanted = data.draw(st.lists(st.integers(0, len(everything)), max_size=8))
    placement = try_plan(layers, size, wanted)
    chosen = set(wanted)
    kinds = [set(kind) for kind in (layers.full, layers.windowed) if kind]
    if chosen - everything or chosen & layers.fixed or any(kind <= chosen for kind in kinds):
        assert placement is None
    if placement:
        check(placement, layers, size)
        assert placement.host == tuple(sorted(chosen))
        assert plan(layers, size, sorted(chosen), PLENTY) == placement


LAYERS = Layers(full=(2, 5, 8, 11), windowed=(0, 1, 3, 4, 6, 7, 9, 10), fixed=frozenset({10, 11}))
SIZE = KvSize(16, 1 << 20, full_layers=4, windowed_layers=8, window=100, tokens_per_step=64)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ([2, 12], "layer 12, which has no separate KV cache; choose from layers 0-11"),
        ([-1], "layer -1"),
        ([0, 11], "layer 11, but other layers share its KV cache; remove it"),
        (13, "host_kv_layers 13 is not possible with 12 layers"),
        (
            [2],
            "host_kv_layers 2 leaves 3 full-attention and 8 sliding-window layers.*4 block tables in vLLM instead of 3",
        ),
    ],
)
def test_errors_name_the_value_and_the_fix(wanted: Any, words: str) -> None:
    with pytest.raises(PlacementError, match=words) as caught:
        plan(LAYERS, SIZE, wanted, PLENTY)
    assert_one_sentence(caught.value)


@pytest.mark.parametrize(("kind", "name"), [(LAYERS.full, "full-attention"), (LAYERS.windowed, "sliding-window")])
def test_one_layer_of_each_kind_stays_on_the_device(kind: tuple[int, ...], name: str) -> None:
    free = Layers(LAYERS.full, LAYERS.windowed)
    with pytest.raises(PlacementError, match=f"leaves no {name} layer.*remove at least one of {indices_text(kind)}"):
        plan(free, SIZE, list(kind), PLENTY)


def test_automatic_plans_add_no_block_tables() -> None:
    """One full layer less would fit into a little less memory, with a fourth table."""
    free, whole = Layers(LAYERS.full, LAYERS.windowed), SIZE.of_request(100_000)
    for percent in range(40, 101):
        chosen = plan(free, SIZE, "auto", Limits(whole * percent // 100, 1 << 50, 100_000))
        assert chosen.device_size.groups() <= 3


def test_layers_of_one_block_table_share_no_memory() -> None:
    assert plan(Layers(tuple(range(4))), KvSize(16, 1000, full_layers=4), 2, PLENTY).slabs == 2


def test_windows_of_two_lengths_are_counted_apart() -> None:
    """As vLLM does: two tables of each window, and one of full layers."""
    layers = Layers((2, 5), (0, 1, 3, 4, 6, 7, 8, 9), windows=(100, 7, 100, 7, 100, 7, 100, 7))
    size = KvSize(16, 1000, 2, 8, tokens_per_step=64, windows=layers.windows)
    assert (size.groups(), size.layers_per_group()) == (5, 2)
    blocks = 2 * -(-1000 // 16) + 4 * (-(-163 // 16) + 1) + 4 * (-(-70 // 16) + 1)
    assert size.of_request(1000) == (blocks + 2) * 1000
    placement = plan(layers, size, [0, 1, 2, 3, 4], PLENTY)
    assert (placement.host_size.windowed(), placement.device_size.windowed()) == ({100: 2, 7: 2}, {100: 2, 7: 2})
    assert placement.host_seconds(1000, 1e6) == pytest.approx((1000 + 2 * 100 + 2 * 7) * 1000 / 16 / 1e6, rel=0.01)
    with pytest.raises(PlacementError, match=r"no sliding-window \(7 tokens\) layer.*one of 1, 4, 7, 9 from"):
        plan(layers, size, [1, 4, 7, 9], PLENTY)


def test_windows_of_more_lengths_are_refused() -> None:
    layers = Layers((0,), (1, 2, 3), windows=(100, 7, 40))
    size = KvSize(16, 1000, 1, 3, windows=layers.windows)
    with pytest.raises(PlacementError, match=r"3 lengths \(7, 40, 100 tokens\), and 2 are supported") as caught:
        plan(layers, size, 1, PLENTY)
    assert_one_sentence(caught.value)
    assert plan(layers, size, 0, PLENTY).host == ()


def test_a_model_without_a_cache_needs_no_plan() -> None:
    none, size = Layers(()), KvSize(block_size=16, bytes_per_block=1024, full_layers=0)
    for wanted in ("auto", 0, []):
        assert plan(none, size, wanted, Limits(0, 0, 1000)).host == ()
    with pytest.raises(PlacementError, match="host_kv_layers 1 is not possible with 0 layers"):
        plan(none, size, 1, PLENTY)


@given(models(), st.integers(0, 1 << 22), st.integers(0, 1 << 22), st.data())
def test_both_sides_limit_the_number_of_blocks(
    model: tuple[Layers, KvSize], device_bytes: int, host_bytes: int, data: st.DataObject
) -> None:
    placement = data.draw(st.sampled_from(list(every_split(*model))))
    blocks = placement.max_blocks(device_bytes, host_bytes)
    page = placement.device_size.layers_per_group() * placement.bytes_per_block
    assert blocks * page <= device_bytes
    assert placement.host_bytes(blocks) <= host_bytes
    more = blocks + 1
    assert more * page > device_bytes or placement.host_bytes(more) > host_bytes
    if not placement.host:
        assert placement.host_bytes(blocks) == 0
    if placement.device_size.groups() == 1:
        assert placement.slabs == len(placement.host), "one block table shares nothing"


def test_a_step_takes_as_long_as_reading_the_kv_of_its_layers() -> None:
    layers = Layers(full=(0, 2), windowed=(1, 3))
    size = KvSize(16, 16 * 1000, full_layers=2, windowed_layers=2, window=100, tokens_per_step=64)
    placement = plan(layers, size, [2, 3], PLENTY)
    assert placement.host_seconds(5000, 1e6) == pytest.approx((5000 + 100) * 1000 / 1e6)
    assert placement.host_seconds(50, 1e6) == pytest.approx((50 + 50) * 1000 / 1e6)


@given(st.sets(st.integers(0, 60)))
def test_the_text_of_indices_can_be_parsed(numbers: set[int]) -> None:
    text = indices_text(numbers)
    if not numbers:
        assert text == "none"
        return
    parts = [part.split("-") for part in text.split(", ")]
    assert [n for part in parts for n in range(int(part[0]), int(part[-1]) + 1)] == sorted(numbers)
    assert all(int(later[0]) > int(earlier[-1]) + 1 for earlier, later in pairwise(parts))


def test_host_blocks_may_be_smaller_than_device_blocks() -> None:
    """Host layers of 8 bits: their memory holds more blocks, and a step reads fewer bytes of it."""
    layers = Layers(tuple(range(4)))
    size = KvSize(block_size=16, bytes_per_block=2000, full_layers=4)
    for block in (None, 1104):
        narrow = replace(size, host_bytes_per_block=block)
        found = plan(layers, narrow, 3, Limits(0, 0, 0))
        bytes_of_block = block or 2000
        assert found.host_bytes(10) == 10 * 3 * bytes_of_block
        assert found.max_blocks(10**9, 3 * 10 * bytes_of_block + 1) == 10
        assert found.device_size.bytes_per_block == 2000
        assert found.host_seconds(160, 1.0) == 160 * 3 * bytes_of_block / 16
    limits = Limits(device_bytes=2000 * 11, host_bytes=3 * 11 * 1104, tokens=160)
    assert len(plan(layers, replace(size, host_bytes_per_block=1104), "auto", limits).host) == 3
    with pytest.raises(PlacementError):
        plan(layers, size, "auto", limits)
