"""Segments in /dev/shm: shared by all ranks, and a failure of one rank is one of all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fastattention_vllm.parallel import shared_segment
from fastattention_vllm.parallel.shared_segment import FOLDER, share
from tests.other_user import as_another_user, needs_another_user

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


def link(path: Path, target: Path) -> None:
    target.write_bytes(bytes(SIZE))
    path.symlink_to(target)


@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "short", "long", "another user's"])
def test_what_has_the_name_of_a_segment_and_is_none_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a rank has another folder of this name, into which another user has put something first."""
    path = tmp_path / "segment"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "link":
            link(path, tmp_path / "other")
        case "folder":
            path.mkdir()
        case "another user's":
            path.write_bytes(bytes(SIZE))
            monkeypatch.setattr(shared_segment.os, "geteuid", lambda: os.getuid() + 1)
        case _:
            path.write_bytes(bytes(SIZE + (-1 if kind == "short" else 1)))

    def exchange(value: Any) -> list[Any]:
        return [value, (str(path), value[1])] if value[0] else [value, value]

    before = left()
    with pytest.raises(OSError, match=r"/dev/shm of rank 0 cannot be mapped \("):
        share(SIZE, exchange)
    assert left() == before


@needs_another_user
def test_another_user_can_neither_open_nor_remove_a_segment() -> None:
    def exchange(value: Any) -> list[Any]:
        if value[0]:
            as_another_user(lambda: meddle(value[0]))
        return [value]

    (segment,) = share(SIZE, exchange)
    assert bytes(segment) == bytes(SIZE)


def meddle(path: str) -> None:
    for act in (lambda: os.open(path, os.O_RDWR), lambda: os.open(path, os.O_RDONLY), lambda: os.unlink(path)):
        with pytest.raises(PermissionError):
            act()
