"""The stream fraction for given rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.placement.stream_split import ENOUGH, MIN_SPLIT_BYTES, Rates, StreamSplit, stream_split

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
