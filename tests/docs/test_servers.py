"""`vllm serve` commands of README.md and docs/: each such block starts a server, which answers a question."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fastattention_vllm.demo.model import build_demo_model
from tests.docs.pages import Block, blocks_tested_by
from tests.environment import USER_ENVIRONMENT

THIS = "tests/docs/test_servers.py::test_a_documented_server_starts_and_answers"
START_TIMEOUT_S = 240
COMMAND = ".venv/bin/vllm serve MODEL"


def different() -> list[Block]:
    """Each distinct command once: several pages begin with the same command."""
    return list({block.text: block for block in blocks_tested_by(THIS)}.values())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_demo_model(tmp_path_factory.mktemp("documented") / "demo")


@contextlib.contextmanager
def served(command: str, log: Path) -> Iterator[str]:
    """The server's address, once it is healthy. All of its processes are ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command} --host 127.0.0.1 --port {port}"],
            env=USER_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{address}/health", trust_env=False).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"`{command}` did not become ready:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.full
@pytest.mark.timeout(500)
@pytest.mark.parametrize("block", different(), ids=str)
def test_a_documented_server_starts_and_answers(block: Block, model: Path, tmp_path: Path) -> None:
    """As written, except for the model's name, the path of `vllm`, and options that let a small server start sooner."""
    assert block.text.startswith(COMMAND)
    command = block.text.replace(COMMAND, f"{Path(sys.executable).parent / 'vllm'} serve {model}", 1)
    command += " --enforce-eager --max-model-len 2048 --kv-cache-memory-bytes 67108864"
    with served(command, tmp_path / "log") as address:
        body = {"model": str(model), "prompt": "alpha=7319. The weather is fine. alpha=", "max_tokens": 4}
        answer = httpx.post(f"{address}/v1/completions", json=body | {"temperature": 0}, timeout=120, trust_env=False)
        assert answer.json()["choices"][0]["text"].strip() == "7319"
