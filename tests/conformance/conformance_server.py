"""`vllm serve` of the installed version on the demo model, and a question to it, for suites that use HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fastattention_vllm.demo.haystack import make_haystack

START_TIMEOUT_S = 300
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Served:
    url: str
    log: Path


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Served]:
    """Start a server of the demo model, wait until it is ready, and end all of its processes afterwards."""
    model, log = folder / "demo", folder / "serve.log"
    subprocess.run([sys.executable, "-m", "fastattention_vllm.demo", str(model)], check=True, capture_output=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(sys.executable).parent / "vllm"),
        *("serve", str(model), "--attention-backend", "fastattention", "--served-model-name", "demo"),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "16384"),
        *("--kv-cache-memory-bytes", str(512 << 20), "--max-num-batched-tokens", "1024", "--enforce-eager"),
        *arguments,
    ]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _healthy(url):
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"`vllm serve` did not become ready:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        assert "Attention kernel: fastattention CPU" in log.read_text(), "the server must use our backend"
        yield Served(url, log)
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end_group(server.pid)


def check_needle(served: Served, depth: float) -> None:
    """Ten chunks of prefill over a paged cache, then decode. A wrong mask, scale or page loses the number."""
    value = str(1000 + int(depth * 7000))
    prompt = make_haystack(10_000, {"alpha": value}, depths=[depth], ask="alpha").text
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        served.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with OPENER.open(request, timeout=300) as answer:
        completion = json.load(answer)
    assert completion["usage"]["prompt_tokens"] > 9_000
    assert completion["choices"][0]["text"].strip() == value


def _end_group(group: int) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(group, signum)
        except ProcessLookupError:
            return
        time.sleep(1)


def _healthy(url: str) -> bool:
    try:
        with OPENER.open(url + "/health", timeout=5):
            return True
    except OSError:
        return False
