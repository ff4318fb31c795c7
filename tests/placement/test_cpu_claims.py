"""Servers see each other's CPUs, and a server's own processes are no other server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fastattention_vllm.placement import cpu_claims
from fastattention_vllm.placement.cpu_claims import SERVER, claim, others_on

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
