"""A server whose two ranks are Ray workers finds needles, ends with a reason if one is killed, and starts again.

The test prints what it saw as one line of JSON: ``pytest -s``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from fastattention_vllm.demo.haystack import make_haystack
from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DemoModelSpec
from fastattention_vllm.demo.tokenizer import token_id
from tests.environment import USER_ENVIRONMENT

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray"),
    pytest.mark.timeout(900),
]
START_S = 400
"""Like all limits here, it ends what hangs and is no speed limit, because the machine may be busy."""
ERROR_S = 30
END_S = 60
SHAPE: dict[str, Any] = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "float16"}
HOST_LAYERS = 3
TOKENS = 32_000
NEEDLES = {"alpha": "7319", "gamma": "90", "omega": "318"}
DEPTHS = [0.1, 0.5, 0.9]
ARGUMENTS = (
    "--attention-backend fastattention --distributed-executor-backend ray --tensor-parallel-size 2 --enforce-eager "
    "--served-model-name demo --host 127.0.0.1 --max-model-len 32768 --max-num-batched-tokens 2048 "
    f"--gpu-memory-utilization 0.3 --kv-cache-memory-bytes {512 << 20}"
).split()
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
SHARED_MEMORY = Path("/dev/shm")
OURS = "fastattention"
"""How names of this project's shared memory begin. vLLM's queues are psm_*."""
WORKER = "ray::RayWo"
"""Name of vLLM's worker (psutil truncates names). Its torch TCPStore listens on all addresses under every executor."""
RAYS_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""They may outlive their cluster by a minute, until they give up telling it that Ray's daemon has ended."""


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    client: httpx.Client
    log: Path
    started: float = field(default_factory=time.monotonic)
    family: list[psutil.Process] = field(default_factory=list)
    """All processes of the server, with those of its Ray cluster, once it was healthy."""

    def healthy(self) -> bool:
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def wait_until_healthy(self) -> None:
        while not self.healthy():
            assert self.process.poll() is None, self.end_of_log()
            assert time.monotonic() - self.started < START_S, self.end_of_log()
            time.sleep(0.2)
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def end_of_log(self) -> str:
        return self.log.read_text()[-6000:]

    def workers(self) -> list[psutil.Process]:
        return [one for one in self.family if one.is_running() and one.name().startswith(WORKER)]

    def running(self) -> list[str]:
        """Processes of the server that have not ended, without Ray's agents."""
        left = []
        for one in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                alive = one.is_running() and one.status() != psutil.STATUS_ZOMBIE
                if alive and one.name() not in RAYS_AGENTS:
                    left.append(f"{one.name()} ({one.pid})")
        return left

    def shared_memory(self) -> set[str]:
        """Names of shared memory that the server uses now."""
        paths = set()
        for one in self.family:
            with contextlib.suppress(psutil.Error):
                paths.update(Path(found.path) for found in one.memory_maps())
        return {path.name for path in paths if path.parent == SHARED_MEMORY and path.name.startswith((OURS, "psm_"))}

    def host_layers(self) -> list[str]:
        """The metric of each rank."""
        metrics = self.client.get("/metrics").text
        return re.findall(r'^fastattention:attention_layers\{place="host".*', metrics, re.M)

    def listening(self) -> list[str]:
        """Programs of the server, and the addresses on which they accept connections from other machines."""
        found = set()
        for one in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                for connection in one.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.ip not in LOOPBACK:
                        found.add(f"{one.name()} {connection.laddr.ip}")
        return sorted(found)

    def ask(self, name: str) -> httpx.Response:
        haystack = make_haystack(TOKENS, NEEDLES, depths=DEPTHS)
        question = [*haystack.token_ids, token_id(f" {name}"), token_id("=")]
        body = {"model": "demo", "prompt": question, "max_tokens": 1, "temperature": 0}
        return self.client.post("/v1/completions", json=body)

    def found(self) -> dict[str, str]:
        return {name: self.ask(name).json()["choices"][0]["text"] for name in NEEDLES}


@contextlib.contextmanager
def serving(model: Path, log: Path) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = json.dumps({"fastattention": {"host_kv_layers": HOST_LAYERS}})
    vllm = shutil.which("vllm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert vllm is not None
    # The server starts a cluster of its own.
    environment = {name: value for name, value in USER_ENVIRONMENT.items() if name != "RAY_ADDRESS"}
    with log.open("wb") as output, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        process = subprocess.Popen(
            [vllm, "serve", str(model), *ARGUMENTS, "--additional-config", options, "--port", str(port)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        server = Server(process, client, log)
        try:
            server.wait_until_healthy()
            yield server
        finally:
            family = server.family
            if not family and process.poll() is None:
                family = psutil.Process(process.pid).children(recursive=True)
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            if process.poll() is None:
                process.kill()
            process.wait()


def left_of(names: set[str]) -> list[str]:
    """Which of this shared memory still exists."""
    return sorted(name for name in names if (SHARED_MEMORY / name).exists())


def wait_for(condition: Callable[[], bool], limit: float, server: Server) -> float:
    """Seconds until the condition is met."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit, server.end_of_log()
        time.sleep(0.05)
    return time.monotonic() - began


def left_after(limit: float, server: Server) -> list[str]:
    """The server's processes that have not ended after so many seconds."""
    deadline = time.monotonic() + limit
    while server.running() and time.monotonic() < deadline:
        time.sleep(0.05)
    return server.running()


def long_answer(server: Server, lines: list[str]) -> float:
    """Append the lines of a stream as they come. Returns the time of its end."""
    body = {"model": "demo", "prompt": "delta=4711.", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    with (
        contextlib.suppress(httpx.TransportError),
        server.client.stream("POST", "/v1/completions", json=body, timeout=ERROR_S + END_S) as stream,
    ):
        lines.extend(filter(None, stream.iter_lines()))
    return time.monotonic()


def told(server: Server) -> str:
    """What a new request is told."""
    try:
        answer = server.ask("alpha")
    except httpx.TransportError as error:
        return repr(error)
    return f"{answer.status_code} {answer.text[:500]}"


def kill_a_worker(server: Server, seen: dict[str, Any]) -> None:
    """Kill one of the two workers while a request is answered, and note what happens."""
    lines: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(2) as clients:
        stream = clients.submit(long_answer, server, lines)
        wait_for(lambda: len(lines) >= 10 or stream.done(), START_S, server)
        assert not stream.done(), lines[-3:]
        worker, _ = server.workers()
        worker.kill()
        killed = time.monotonic()
        new = clients.submit(told, server)
        seen["health fails after s"] = wait_for(lambda: not server.healthy(), ERROR_S, server)
        seen["request in flight ends after s"] = stream.result(ERROR_S + END_S) - killed
        seen["request in flight is told"] = lines[-3:]
        seen["new request is told"] = new.result(ERROR_S + END_S)
        seen["new request ends after s"] = time.monotonic() - killed
    seen["exit status"] = server.process.wait(END_S)
    seen["exit after s"] = time.monotonic() - killed
    seen["last line"] = server.log.read_text().splitlines()[-1]
    seen["processes left"] = left_after(END_S, server)
    seen["processes end after s"] = time.monotonic() - killed


def test_a_killed_worker_ends_the_server_with_a_reason_and_it_starts_again(tmp_path: Path) -> None:
    model = build_demo_model(tmp_path / "demo", DemoModelSpec(**SHAPE))
    seen: dict[str, Any] = {}
    try:
        with serving(model, tmp_path / "first.log") as server:
            seen["first start s"] = time.monotonic() - server.started
            seen["found"] = server.found()
            wait_for(lambda: len(server.host_layers()) == 2, ERROR_S, server)
            seen["host layers"] = server.host_layers()
            seen["listening"] = server.listening()
            memory = server.shared_memory()
            kill_a_worker(server, seen)
        seen["shared memory"] = len(memory)
        seen["shared memory left after the kill"] = left_of(memory)
        with serving(model, tmp_path / "second.log") as server:
            seen["second start s"] = time.monotonic() - server.started
            seen["found again"] = server.found()
            memory = server.shared_memory()
            stopped = time.monotonic()
            server.process.terminate()
            seen["second exit status"] = server.process.wait(END_S)
            seen["second exit after s"] = time.monotonic() - stopped
            seen["processes left by the second"] = left_after(END_S, server)
        seen["shared memory left"] = left_of(memory)
    finally:
        print(json.dumps(seen))
    assert seen["found"] == seen["found again"] == NEEDLES
    assert [line.split()[-1] for line in seen["host layers"]] == [f"{HOST_LAYERS}.0"] * 2
    assert any('"error"' in line for line in seen["request in flight is told"])
    assert not seen["new request is told"].startswith("200")
    assert seen["exit status"] == 1
    # vLLM 0.23 begins each line with the name of the process.
    reason = rf"worker [01] on {re.escape(socket.gethostname())} \(\S+\) ended\."
    line = rf"(\(APIServer pid=\d+\) )?fastattention: the server ended because the engine died: {reason}"
    assert re.fullmatch(line, seen["last line"])
    assert seen["processes left"] == []
    assert seen["second exit status"] == 0
    assert seen["processes left by the second"] == []
    assert [one for one in seen["listening"] if not one.startswith(WORKER)] == [], "reachable from other machines"
    assert seen["shared memory"]
    assert seen["shared memory left after the kill"] == seen["shared memory left"] == []
