"""Servers see each other's CPUs, and a server's own processes are no other server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fastattention_vllm.placement import cpu_claims
from fastattention_vllm.placement.cpu_claims import SERVER, claim

FAR = 1_000_000
"""No machine has these CPUs, so no real server can be in the way."""
PROCESS = """
import sys
from fastattention_vllm.placement.cpu_claims import claim
print(claim([int(word) for word in sys.argv[2:]], shared=sys.argv[1] == "shared"), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu_claims, "_held", {})
    monkeypatch.setenv(SERVER, "this-one")
    yield
    cpu_claims.release()


@contextmanager
def process(*cpus: int, how: str = "alone", server: str | None = None) -> Iterator[str]:
    """Another process that claims ``cpus`` until the end; what it found."""
    environment = {name: text for name, text in os.environ.items() if name != SERVER}
    command = [sys.executable, "-c", PROCESS, how, *map(str, cpus)]
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


def test_a_second_server_claims_only_what_is_free() -> None:
    assert claim([FAR, FAR + 1]) == []
    with process(FAR + 1, FAR + 2) as found:
        assert found == f"[{FAR + 1}]"
        with process(FAR + 2) as found:
            assert found == "[]", "the refused server has announced nothing"


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


def test_cpus_that_the_user_has_chosen_are_announced_in_any_case() -> None:
    assert claim([FAR]) == []
    with process(FAR, FAR + 1, how="shared") as found:
        assert found == f"[{FAR}]"
        assert claim([FAR + 1]) == [FAR + 1]
