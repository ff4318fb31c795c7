"""benchmarks/volta_weights_sim.py: which variant and which CTAs stand for a launch."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def script() -> Any:
    import volta_weights_sim

    return volta_weights_sim


def test_more_tiles_are_used_where_they_save_a_wave(script: Any) -> None:
    assert script.best("int4", 1, 5120).tiles == 4
    assert script.best("int4", 1, 8704).tiles == 7
    assert script.best("int4", 9, 8704).rows == 16


def test_scales_count_as_bytes(script: Any) -> None:
    assert script.weight_bytes("int4", 256, 80) == 256 * 80 / 2 + 2 * 80 * 4
    assert script.weight_bytes("e4m3", 256, 80) == 256 * 80


@pytest.mark.more
def test_no_launch_is_faster_than_its_bytes(script: Any) -> None:
    """Some of SM 0's CTAs have a tile more than others. All must be counted."""
    columns = 8 * (160 * 7 + 160 * 6 + 20)  # two waves
    found = script.simulated("int8", 1, 512, columns, script.best("int8", 1, columns))
    assert found.ctas == 320
    assert found.seconds <= found.pessimistic
    assert script.weight_bytes("int8", 512, columns) / found.seconds < 1e9 * script.FEED
    assert found.error < 2e-3
