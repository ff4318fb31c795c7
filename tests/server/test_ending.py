"""A server that is stopped while long requests are in flight sends their clients an error, and ends."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from fastattention_vllm.demo.haystack import make_haystack
from scripts.serve import build_model_if_needed
from tests.environment import USER_ENVIRONMENT
from tests.server.conftest import ROOT, START_TIMEOUT_S, free_port

END_S = 120
"""A limit only against waiting forever. The soak, which `make test` does not run, allows 10 seconds."""
TOKENS = 60_000


@contextlib.contextmanager
def serving(module: str, log: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server, run by a module that takes the command line of `vllm`."""
    build_model_if_needed()
    port = free_port()
    command = f"serve --config configs/cpu-demo.yaml --host 127.0.0.1 --kv-cache-memory-bytes {512 << 20}".split()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *command, "--port", str(port), *arguments],
            cwd=ROOT,
            env=USER_ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    family = []
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_TIMEOUT_S
        while not healthy(url):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
        yield process, url
    finally:
        for one in [process, *family]:
            if one.poll() is None if isinstance(one, subprocess.Popen) else one.is_running():
                one.kill()
        process.wait()


@pytest.fixture
def late(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server whose event loop is late when the engine ends."""
    with serving("tests.server.slow_loop", tmp_path / "serve.log") as found:
        yield found


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


def running(url: str) -> int:
    found = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", httpx.get(f"{url}/metrics", timeout=60).text, re.M)
    return int(float(found[1])) if found else 0


def ask(url: str, seed: int) -> httpx.Response | httpx.TransportError:
    prompt = make_haystack(TOKENS, {"alpha": "7319"}, depths=[0.5], ask="alpha", seed=seed).text
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": seed % 2 == 1}
    try:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=None)
    except httpx.TransportError as error:
        return error


def test_requests_in_flight_get_an_error_and_the_server_ends(
    late: tuple[subprocess.Popen[bytes], str], tmp_path: Path
) -> None:
    process, url = late
    family = psutil.Process(process.pid).children(recursive=True)
    with concurrent.futures.ThreadPoolExecutor(4) as clients, socket.socket() as deaf:
        stop_reading(process, url, deaf)
        answers = [clients.submit(ask, url, seed) for seed in range(4)]
        while running(url) < 2:
            time.sleep(0.05)
        assert not any(answer.done() for answer in answers), "the requests must still be in flight"
        os.kill(process.pid, signal.SIGTERM)
        try:
            process.wait(END_S)
        finally:
            process.kill()
        _, alive = psutil.wait_procs(family, timeout=END_S)
        assert alive == []
        for answer in answers:
            assert told(answer.result()), answer.result()
    log = (tmp_path / "serve.log").read_text()
    assert "Traceback" not in log
    assert "leaked" not in log


@pytest.mark.full
def test_with_a_shutdown_timeout_requests_in_flight_are_completed(tmp_path: Path) -> None:
    body = {"model": "demo", "prompt": "delta=4711.", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    arguments = ("--shutdown-timeout", str(END_S))
    with serving("vllm.entrypoints.cli.main", tmp_path / "serve.log", *arguments) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=None) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            os.kill(process.pid, signal.SIGTERM)
            rest = [line for line in lines if line]
        assert process.wait(END_S) == 0
    assert first.startswith("data: ")
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert "Traceback" not in (tmp_path / "serve.log").read_text()


def told(answer: httpx.Response | httpx.TransportError) -> bool:
    """Whether the client got an error, or an answer that is marked as aborted."""
    if isinstance(answer, httpx.TransportError):
        return True
    return answer.status_code >= 500 or '"error"' in answer.text or '"finish_reason":"abort"' in answer.text


def stop_reading(process: subprocess.Popen[bytes], url: str, deaf: socket.socket) -> None:
    """Request a long stream, read none of it, and wait until the server cannot write any more."""
    body = '{"model": "demo", "prompt": "delta=4711.", "max_tokens": 60000, "ignore_eos": true, "stream": true}'
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    deaf.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    server, client = deaf.getpeername(), deaf.getsockname()
    while not unsent(server, client):
        assert process.poll() is None
        time.sleep(0.3)


def unsent(server: tuple[str, int], client: tuple[str, int]) -> int:
    """Bytes in the server's socket that do not fit into the client's, as Linux counts them."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        if (int(local.split(":")[1], 16), int(remote.split(":")[1], 16)) == (server[1], client[1]):
            return int(queues.split(":")[0], 16)
    return 0
