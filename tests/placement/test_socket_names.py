"""Names of sockets that any user may have made."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastattention_vllm.placement import socket_names
from tests.other_user import NOBODY, another_user_holds, needs_another_user

NAMES = [
    b"\0fastattention-test/\xff\xfe",
    "\0fastattention-test/²".encode(),
    b"\0fastattention-test/line\nbreak",
    b"\0fastattention-test/" + b"9" * 80,
    b"\0fastattention-test/ spaces  and/\x85/slashes ",
]


@contextmanager
def bound(name: bytes) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as holder:
        holder.bind(name)
        yield


def bind(name: bytes) -> socket.socket:
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    holder.bind(name)
    return holder


def owners(name: bytes) -> list[int | None]:
    return [owner for found, owner in socket_names.names() if found == name]


@pytest.fixture(params=["netlink", "list"])
def told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether Linux tells the owners."""
    if request.param == "list":
        monkeypatch.setattr(socket_names, "_asked", refused)
    return bool(request.param == "netlink")


def refused() -> Iterator[tuple[bytes, int]]:
    raise PermissionError("an older Linux, or a container that forbids netlink")


@pytest.mark.parametrize("name", NAMES)
def test_names_are_bytes(name: bytes, told: bool) -> None:
    assert owners(name) == []
    with bound(name):
        # The list shows one name on two lines.
        assert owners(name) == ([os.geteuid()] if told else [] if b"\n" in name else [None])


@needs_another_user
def test_the_owner_of_a_name_is_told() -> None:
    with another_user_holds(lambda: bind(NAMES[0])):
        assert owners(NAMES[0]) == [NOBODY]


def test_many_names_are_all_found() -> None:
    """More than fit into one answer."""
    holders = [bind(b"\0fastattention-test/many/%d" % number) for number in range(600)]
    try:
        found = {name for name, _ in socket_names.names()}
        assert {b"\0fastattention-test/many/%d" % number for number in range(600)} <= found
    finally:
        for holder in holders:
            holder.close()


@pytest.mark.parametrize("content", [None, b"", b"\xff\n\n\0:", b"0: 1 2 3 4 5 x @a\n", b"A" * 100_000])
def test_a_list_of_another_form_has_no_names(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_names, "_asked", refused)
    monkeypatch.setattr(socket_names, "LIST", tmp_path / "unix")
    if content is not None:
        (tmp_path / "unix").write_bytes(content)
    assert socket_names.names() == []


@pytest.mark.parametrize("data", [b"", b"\1", b"\0" * 16, b"\2" * 40, b"\xff" * 64])
def test_broken_answers_of_linux_end(data: bytes) -> None:
    assert len(list(socket_names._parts(data, socket_names.HEADER))) <= 4
