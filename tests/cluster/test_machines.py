"""Two machines of a test reach each other, and nothing of theirs is shared or left behind."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.cluster.machines import missing, two_machines

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(missing()), reason=missing())]
LISTEN = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    print("listening", flush=True)
    server.accept()[0].sendall(socket.gethostname().encode())
"""
ASK = 'import socket; print(socket.create_connection(("{}", 5000), 10).makefile().read())'


def test_two_machines_are_separate_and_connected(tmp_path: Path) -> None:
    with two_machines(tmp_path) as (first, second):
        first.run(["touch", "/dev/shm/mine"])
        assert (first.shared_memory(), second.shared_memory()) == ({"mine"}, set())
        log = tmp_path / "log"
        server = second.start(["python3", "-c", LISTEN], log)
        while "listening" not in log.read_text():
            assert server.poll() is None
        assert [process.name() for process in second.processes()] == ["python3"]
        assert first.processes() == []
        assert first.run(["python3", "-c", ASK.format(second.address)]).strip() == "node2"
        assert server.wait(30) == 0
        left = second.start(["sleep", "100"], log)
        inits = [first.init, second.init]
    assert left.wait(30) != 0
    assert psutil.wait_procs(inits, timeout=30)[1] == []
