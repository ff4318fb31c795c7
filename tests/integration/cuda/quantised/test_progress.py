"""What the log says while quantised weights are repacked."""

from __future__ import annotations

import pytest

from fastattention_vllm.integration.cuda.quantised import progress
from fastattention_vllm.integration.cuda.quantised.progress import Progress

GIB = 1 << 30


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(progress, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(progress.logger, "info", lambda line, *values: lines.append(line % values))
    return lines


def repack(layers: int, seconds: float) -> None:
    """Of 1 GiB each."""
    now = [0.0]
    found = Progress(lambda: now[0])
    for _ in range(layers):
        found.expect(GIB)
    for _ in range(layers):
        found.begin()
        now[0] += seconds
        found.end(GIB)


def test_a_line_every_ten_seconds(said: list[str]) -> None:
    repack(layers=6, seconds=4)
    assert said == [
        "Repacking the quantised weights of 6 layers (6.00 GiB).",
        "Repacked 3 of 6 layers with quantised weights (3.00 GiB).",
        "Repacked 6 layers with quantised weights (6.00 GiB) in 24.0 s.",
    ]


def test_two_lines_for_a_fast_model(said: list[str]) -> None:
    repack(layers=400, seconds=0.02)
    assert len(said) == 2


def test_a_second_model_begins_anew(said: list[str]) -> None:
    """A drafter may share the configuration of its model."""
    found = Progress(lambda: 0.0)
    for nbytes in (GIB, 2 * GIB):
        found.expect(nbytes)
        found.begin()
        found.end(nbytes)
    assert said[2:] == [
        "Repacking the quantised weights of 1 layers (2.00 GiB).",
        "Repacked 1 layers with quantised weights (2.00 GiB) in 0.0 s.",
    ]


def test_weights_that_are_loaded_again_are_counted_again(said: list[str]) -> None:
    found = Progress(lambda: 0.0)
    for _ in range(3):
        found.expect(GIB)
    for _ in range(6):
        found.begin()
        found.end(GIB)
    assert len(said) == 4
    assert said[2:] == said[:2]


def test_the_other_ranks_are_silent(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "get_tensor_model_parallel_rank", lambda: 1)
    repack(layers=2, seconds=20)
    assert said == []
