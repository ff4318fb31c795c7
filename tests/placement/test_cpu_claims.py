"""Servers see each other's CPUs, and a server's own processes are no other server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fastattention_vllm.placement import cpu_claims, socket_names
from fastattention_vllm.placement.cpu_claims import PREFIX, SERVER, announced_by_other_users, claim, others_on
from tests.other_user import another_user_holds, needs_another_user

FAR = 1_000_000
"""No machine has these CPUs, so no real server can be in the way."""
PROCESS = """
import sys
from fastattention_vllm.placement.cpu_claims import claim
print(claim([int(word) for word in sys.argv[1:]]), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu_claims, "_held", {})
    monkeypatch.setenv(SERVER, "this-one")
    yield
    cpu_claims.release()


@contextmanager
def process(*cpus: int, server: str | None = None) -> Iterator[str]:
    """Another process that claims ``cpus`` until the end; what it found."""
    environment = {name: text for name, text in os.environ.items() if name != SERVER}
    command = [sys.executable, "-c", PROCESS, *map(str, cpus)]
    with subprocess.Popen(
        command,
        env=environment | ({SERVER: server} if server else {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        yield running.stdout.readline().strip()
        running.communicate("")


def test_servers_see_the_cpus_that_they_have_in_common() -> None:
    assert claim([FAR, FAR + 1]) == []
    with process(FAR + 1, FAR + 2) as found:
        assert found == f"[{FAR + 1}]"
        assert others_on([FAR, FAR + 1]) == [FAR + 1], "the first one sees it, too"
        with process(FAR + 3) as found:
            assert found == "[]"


def test_cpus_are_free_when_their_server_has_ended() -> None:
    with process(FAR) as found:
        assert found == "[]"
        assert claim([FAR]) == [FAR]
    assert claim([FAR]) == []


def test_processes_of_one_server_share_its_cpus() -> None:
    assert claim([FAR]) == []
    with process(FAR, FAR + 1, server="this-one") as found:
        assert found == "[]"
        assert claim([FAR, FAR + 1]) == []


def test_a_second_engine_gives_up_what_it_does_not_use() -> None:
    assert claim([FAR, FAR + 1]) == []
    assert claim([FAR + 1]) == []
    with process(FAR) as found:
        assert found == "[]"


def test_bound_threads_are_unbound_when_another_server_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_claims, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(cpu_claims, "_watcher", None)
    # A watcher of an engine of another test in this process may unbind its threads, too.
    others_on = cpu_claims.others_on
    monkeypatch.setattr(cpu_claims, "others_on", lambda cpus: others_on(cpus) if list(cpus) == [FAR] else [])
    allowed, done, said = os.sched_getaffinity(0), threading.Event(), threading.Event()
    ready: list[int] = []

    def bound() -> None:
        os.sched_setaffinity(0, {min(allowed)})
        ready.append(threading.get_native_id())
        done.wait(60)

    thread = threading.Thread(target=bound)
    thread.start()
    try:
        while not ready:
            time.sleep(0.01)
        assert claim([FAR]) == []
        cpu_claims.unbind_beside_others([FAR], allowed, lambda common: said.set() if common == [FAR] else None)
        assert not said.wait(0.2)
        assert os.sched_getaffinity(ready[0]) == {min(allowed)}
        with process(FAR):
            assert said.wait(60)
            assert os.sched_getaffinity(ready[0]) == allowed
    finally:
        done.set()
        thread.join()


def bind(name: bytes) -> socket.socket:
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    holder.bind(name)
    return holder


def without_owners() -> Iterator[tuple[bytes, int]]:
    raise OSError("Linux before 5.3")


@pytest.mark.parametrize("owners", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        b"\0another program/\xff\xfe",
        f"\0{PREFIX}/\u00b2/x".encode(),
        f"\0{PREFIX}/\u0661/x".encode(),
        f"\0{PREFIX}/-{FAR}/x".encode(),
        f"\0{PREFIX}/ {FAR}/x".encode(),
        f"\0{PREFIX}/{'9' * 80}/x".encode(),
        f"\0{PREFIX}//x".encode(),
        f"\0{PREFIX}/{FAR}/".encode(),
        f"\0{PREFIX}/{FAR}/x/y".encode(),
    ],
)
def test_no_name_of_a_socket_ends_a_start_or_the_watcher(
    name: bytes, owners: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_claims, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(cpu_claims, "_watcher", None)
    if not owners:
        monkeypatch.setattr(socket_names, "_asked", without_owners)
    said: list[list[int]] = []
    with bind(name):
        assert claim([FAR]) == []
        assert others_on([FAR, 10**80 - 1]) == []
        cpu_claims.unbind_beside_others([FAR], os.sched_getaffinity(0), said.append)
        time.sleep(0.1)
        assert cpu_claims._watcher is not None
        assert cpu_claims._watcher.is_alive()
    with bind(f"\0{PREFIX}/{FAR}/another".encode()):
        cpu_claims._watcher.join(60)
    assert said == [[FAR]]


@needs_another_user
def test_announcements_of_other_users_are_reported_and_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, also = f"\0{PREFIX}/{FAR}/fake".encode(), f"\0{PREFIX}/{FAR + 1}/fake".encode()
    with another_user_holds(lambda: (bind(fake), bind(also))), bind(f"\0{PREFIX}/{FAR + 1}/server".encode()):
        assert claim([FAR, FAR + 1]) == [FAR + 1]
        assert announced_by_other_users([FAR, FAR + 1]) == [FAR]
        monkeypatch.setattr(socket_names, "_asked", without_owners)
        assert others_on([FAR, FAR + 1]) == [FAR, FAR + 1], "Linux does not tell whose they are"
        assert announced_by_other_users([FAR, FAR + 1]) == []


@pytest.mark.parametrize("error", [PermissionError(1, "seccomp"), OSError(97, "Address family not supported")])
def test_where_netlink_is_forbidden_servers_start_and_see_each_other(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd's RestrictAddressFamilies gives the second error, on every Linux."""
    genuine = socket.socket

    def restricted(family: int = -1, *more: int) -> socket.socket:
        if family == socket.AF_NETLINK:
            raise error
        return genuine(family, *more)

    with bind(f"\0{PREFIX}/{FAR}/another".encode()):
        monkeypatch.setattr(socket_names.socket, "socket", restricted)
        assert claim([FAR, FAR + 1]) == [FAR]
        assert announced_by_other_users([FAR]) == []


@needs_another_user
def test_servers_of_root_are_believed_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_claims.os, "geteuid", lambda: 1000)
    with bind(f"\0{PREFIX}/{FAR}/server".encode()):
        assert others_on([FAR]) == [FAR]
