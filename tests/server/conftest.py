"""One `make serve` for all tests of this folder: the real command, the demo model, the real HTTP server."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import pytest

from tests.environment import USER_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
READY = "Ctrl-C stops the server."
START_TIMEOUT_S = 400
"""Like all limits here, it ends what hangs and is no speed limit, because the machine may be busy."""
END_TIMEOUT_S = 120


@dataclass
class Served:
    port: int
    banner: str
    """Output of `make serve` up to the time when the server was healthy."""
    launcher: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.launcher.pid).children(recursive=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(log: Path) -> Served:
    """Start the command behind `make serve` and wait for the last line of its banner."""
    port = free_port()
    with log.open("wb") as output:
        launcher = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "serve.py")],
            cwd=ROOT,
            env=USER_ENVIRONMENT | {"PORT": str(port)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while READY not in log.read_text():
        if launcher.poll() is not None or time.monotonic() > deadline:
            launcher.kill()
            pytest.fail(f"`make serve` did not become ready:\n{log.read_text()[-4000:]}")
        time.sleep(0.2)
    banner = re.sub(r"^(INFO|\().*\n", "", log.read_text(), flags=re.MULTILINE)
    return Served(port, banner, launcher, log)


def stop(served: Served, signum: signal.Signals = signal.SIGINT) -> list[psutil.Process]:
    """Send the signal to the launcher as a terminal would. Returns the processes that are left after it has ended."""
    family = served.descendants()
    served.launcher.send_signal(signum)
    served.launcher.wait(END_TIMEOUT_S)
    _, alive = psutil.wait_procs(family, timeout=END_TIMEOUT_S if signum == signal.SIGKILL else 5)
    return alive


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    running = start(tmp_path_factory.mktemp("serve") / "serve.log")
    yield running
    if running.launcher.poll() is None:
        for process in stop(running):
            process.kill()


@pytest.fixture(scope="session")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=600, max_retries=0)
