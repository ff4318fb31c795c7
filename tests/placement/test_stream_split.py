"""The stream fraction for given rates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.placement.stream_split import (
    ENOUGH,
    LAUNCH_SECONDS,
    MIN_SPLIT_BYTES,
    Rates,
    StreamSplit,
    filled_steps_until,
    stream_split,
    whole_steps_until,
)

RATE = st.floats(1e6, 1e12)


@given(RATE, RATE, RATE, RATE, RATE, st.integers(1, 1 << 50))
def test_link_and_cpu_finish_at_the_same_time(
    memory: float, alone: float, link: float, cpu: float, up: float, size: int
) -> None:
    split = stream_split(Rates(memory, alone, link, cpu, up))
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


def test_a_graph_is_left_where_the_link_gains_more_than_launching_costs() -> None:
    rates = Rates(memory=150e9, cpu=100e9, link=50e9, cpu_beside_link=90e9, link_beside_cpu=45e9)
    split = stream_split(rates)
    until = whole_steps_until(split, rates)
    assert until >= MIN_SPLIT_BYTES
    for size in (0.5 * until, 2 * until):
        share = split.of(int(size))
        whole = size / rates.cpu
        pieces = LAUNCH_SECONDS + (whole if share == 0 else (size - split.head_start) / (135e9))
        assert (whole < pieces) == (size < until), size


def test_rates_of_a_decode_step() -> None:
    rates = Rates(150e9, 100e9, link=50e9, cpu_beside_link=90e9, link_beside_cpu=40e9, in_place=25e9)
    assert rates.in_pieces() == 130e9
    assert rates.in_whole_step(shares=True) == 110e9
    assert rates.in_whole_step(shares=False) == 100e9


def test_a_graph_is_never_left_if_the_cpu_reads_alone() -> None:
    rates = Rates(memory=100e9, cpu=95e9, link=50e9, cpu_beside_link=60e9, link_beside_cpu=40e9)
    assert whole_steps_until(stream_split(rates), rates) == math.inf
    slower_together = Rates(memory=150e9, cpu=100e9, link=50e9, cpu_beside_link=60e9, link_beside_cpu=30e9)
    assert whole_steps_until(StreamSplit(0.3, 1 << 20), slower_together) == math.inf


def test_a_share_that_the_user_asked_for_is_read_at_every_length() -> None:
    assert whole_steps_until(StreamSplit(0.5), None) == 0
    assert whole_steps_until(StreamSplit(0.0), None) == math.inf


def test_layers_with_windows_pay_for_pieces_and_gain_nothing() -> None:
    rates = Rates(memory=150e9, cpu=100e9, link=50e9, cpu_beside_link=65e9, link_beside_cpu=45e9)
    split = stream_split(rates)
    assert whole_steps_until(split, rates, 0.5) > whole_steps_until(split, rates)
    assert whole_steps_until(split, rates, 0.0) == math.inf


def test_a_graph_that_reads_in_place_is_left_only_where_copies_are_faster() -> None:
    rates = Rates(150e9, 100e9, link=50e9, cpu_beside_link=90e9, link_beside_cpu=45e9, in_place=50e9)
    split = stream_split(rates)
    assert split.in_graph() == pytest.approx(45 / 135)
    assert whole_steps_until(split, rates, in_graph=True) == math.inf
    slow = replace(rates, in_place=10e9)
    assert stream_split(slow).in_graph() == pytest.approx(9 / 99)
    alone, shared = (whole_steps_until(stream_split(slow), slow, in_graph=share) for share in (False, True))
    assert alone < shared < math.inf or shared == alone == MIN_SPLIT_BYTES


@given(RATE, RATE, RATE, RATE)
def test_link_and_cpu_finish_at_the_same_time_in_a_graph(cpu: float, up: float, link: float, in_place: float) -> None:
    rates = Rates(memory=1e13, cpu=1e6, link=link, cpu_beside_link=cpu, link_beside_cpu=up, in_place=in_place)
    fraction = stream_split(rates).in_graph()
    beside = in_place * min(1, up / link)
    assert fraction / beside == pytest.approx((1 - fraction) / cpu, abs=1e-9 / cpu, rel=1e-6)


def test_a_users_fraction_is_the_same_in_a_graph() -> None:
    assert StreamSplit(0.3).in_graph() == 0.3
    assert whole_steps_until(StreamSplit(0.3), None, in_graph=True) == math.inf


def test_reading_in_place_is_not_faster_beside_the_cpu_than_alone() -> None:
    """As measured once: copies were disturbed while they were timed alone."""
    rates = Rates(143e9, 96e9, link=35.5e9, cpu_beside_link=97e9, link_beside_cpu=51.4e9, in_place=48.7e9)
    assert rates.in_graph() == 48.7e9
    assert stream_split(rates).in_graph() == pytest.approx(48.7 / (97 + 48.7))


@pytest.mark.parametrize("in_graph", [False, True])
def test_drafts_are_made_up_where_a_graph_of_all_gains_more_than_they_cost(in_graph: bool) -> None:
    rates = Rates(160e9, 60e9, link=50e9, cpu_beside_link=55e9, link_beside_cpu=45e9, in_place=40e9)
    drafting = replace(rates, cpu=30e9, cpu_beside_link=25e9, in_place=20e9)
    until = filled_steps_until(rates, drafting, in_graph=in_graph)
    assert until < MIN_SPLIT_BYTES
    for size in (0.5 * until, 2 * until):
        pieces = LAUNCH_SECONDS + size / rates.cpu
        assert (size / drafting.in_whole_step(in_graph) < pieces) == (size < until)
    assert filled_steps_until(rates, drafting, 0.5, in_graph) == pytest.approx(2 * until)


def test_drafts_are_made_up_in_short_contexts_only_and_by_measured_rates() -> None:
    rates = Rates(memory=100e9, cpu=99e9, link=50e9, cpu_beside_link=60e9, link_beside_cpu=40e9)
    assert filled_steps_until(rates, rates) == MIN_SPLIT_BYTES
    assert filled_steps_until(rates, replace(rates, cpu=98e9)) == MIN_SPLIT_BYTES
    assert filled_steps_until(rates, replace(rates, cpu=10e9), sharing=0.0) == MIN_SPLIT_BYTES
    assert filled_steps_until(None, None) == 0


def test_steps_with_drafts_are_split_by_rates_of_their_own() -> None:
    """The CPU attends to several tokens of a request more slowly; the link does not. Graphs hold all drafts."""
    single = Rates(150e9, 100e9, link=50e9, cpu_beside_link=90e9, link_beside_cpu=45e9, in_place=50e9)
    drafting = replace(single, cpu=50e9, cpu_beside_link=45e9)
    split = stream_split(single, drafting)
    size = 1 << 40
    assert split.of(size) == stream_split(single).of(size)
    assert split.of(size, drafts=True) == stream_split(drafting).of(size) > split.of(size)
    assert split.in_graph() == stream_split(drafting).in_graph() == pytest.approx(0.5)
    assert stream_split(single).of(size, drafts=True) == stream_split(single).of(size)
    enough = replace(single, cpu=140e9)
    assert stream_split(enough) == StreamSplit(0.0)
    until = whole_steps_until(stream_split(enough, drafting), drafting)
    assert until == whole_steps_until(stream_split(drafting), drafting) < math.inf
