"""Segments in /dev/shm: shared by all ranks, and a failure of one rank is one of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastattention_vllm.parallel import shared_segment
from fastattention_vllm.parallel.shared_segment import FOLDER, share

SIZE = 8192


def alone(value: Any) -> list[Any]:
    return [value]


def left() -> set[str]:
    return {path.name for path in Path(FOLDER).glob("fastattention-*")}


def test_a_segment_is_zeroed_and_has_no_name() -> None:
    before = left()
    (segment,) = share(SIZE, alone)
    assert bytes(segment) == bytes(SIZE)
    assert left() == before


@pytest.mark.parametrize("step", ["_create", "_open"])
def test_a_failure_here_is_told_to_all(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def exchange(value: Any) -> list[Any]:
        said.append(value)
        return [value]

    def fail(*given: object) -> None:
        raise OSError(28, "No space left on device")

    before = left()
    monkeypatch.setattr(shared_segment, step, fail)
    with pytest.raises(OSError, match=r"/dev/shm of rank 0 .*No space left on device"):
        share(SIZE, exchange)
    assert "No space left" in said[-1][1]
    assert left() == before


@pytest.mark.parametrize("exchanges", [1, 2])
def test_a_failure_elsewhere_ends_here_too(exchanges: int) -> None:
    before, count = left(), 0

    def exchange(value: Any) -> list[Any]:
        nonlocal count
        count += 1
        return [value, (value[0], "has no room" if count == exchanges else "")]

    with pytest.raises(OSError, match=r"/dev/shm of rank 1 has no room\."):
        share(SIZE, exchange)
    assert count == exchanges
    assert left() == before
