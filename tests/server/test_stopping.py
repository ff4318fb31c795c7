"""However `make serve` ends, it leaves no process behind. Each test runs its own server."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.environment import USER_ENVIRONMENT
from tests.server.conftest import ROOT, START_TIMEOUT_S, Served, free_port, start, stop

SIGNALS = [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGTERM, signal.SIGKILL]


@pytest.fixture(params=SIGNALS, ids=lambda s: s.name)
def ended(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Served, list[psutil.Process], signal.Signals]:
    own = start(tmp_path / "serve.log")
    assert len(own.descendants()) >= 3, "API server, engine core and worker"
    return own, stop(own, request.param), request.param


def test_no_process_is_left(ended: tuple[Served, list[psutil.Process], signal.Signals]) -> None:
    own, alive, signum = ended
    assert alive == []
    if signum is not signal.SIGKILL:
        assert own.launcher.returncode == 0
        assert "Traceback" not in own.log.read_text()


@pytest.mark.parametrize("moment", ["Starting: vllm serve", "EngineCore"])
def test_no_process_is_left_when_stopped_while_starting(moment: str, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    with log.open("wb") as output:
        launcher = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "serve.py")],
            env=USER_ENVIRONMENT | {"PORT": str(free_port())},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while moment not in log.read_text():
        assert launcher.poll() is None
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    assert stop(Served(0, "", launcher, log)) == []
    assert launcher.returncode == 0
    assert "Traceback" not in log.read_text().split("Stopping the server")[-1]


STOPPED_AS_IT_SAYS = """
import os, signal, sys
from scripts import serve

def say(*words, **options):
    print(*words, **options)
    if str(words[0]).startswith("Starting"):
        os.kill(os.getpid(), signal.SIGINT)

serve.print = say
sys.exit(serve.main())
"""


def test_the_server_can_be_stopped_right_after_its_first_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_AS_IT_SAYS],
        cwd=ROOT,
        env=USER_ENVIRONMENT | {"PORT": str(free_port())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("Stopping the server ...\n")


@pytest.mark.parametrize("port", ["http", "0", "70000"])
def test_an_invalid_port_is_refused(port: str) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "serve.py")],
        env=USER_ENVIRONMENT | {"PORT": port},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert f"PORT={port}" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_taken_port_is_refused_before_anything_starts() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "serve.py")],
            env=USER_ENVIRONMENT | {"PORT": port},
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode != 0
    assert f"port {port}" in result.stderr
    assert "PORT=" in result.stderr
