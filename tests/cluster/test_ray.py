"""One server over two machines: it answers, counts on both, and ends with a reason when a worker is killed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from fastattention_vllm.demo.haystack import make_haystack
from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DemoModelSpec
from tests.cluster.machines import Machine, missing, two_machines

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(1200),
]
PROGRAMS = Path(sys.executable).parent
RAY, VLLM = str(PROGRAMS / "ray"), str(PROGRAMS / "vllm")
START_S = 400
ERROR_S = 30
END_S = 60
LAYERS, HOST_LAYERS = 5, 4
QUESTION = make_haystack(3000, {"kappa": "7319"}, depths=[0.3], ask="kappa").text
RAYS_OWN = {"ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent"}
# A supervisor in its smallest form. It notes each exit status, and stops after the second.
LOOP = 'for n in 1 2; do rm -f {socket}; "$@" && echo 0 >> {codes} || echo $? >> {codes}; done'


@dataclass
class Server:
    machines: tuple[Machine, Machine]
    loop: subprocess.Popen[bytes]
    client: httpx.Client
    log: Path
    codes: Path
    ray: tuple[set[psutil.Process], set[psutil.Process]]
    """The processes on each machine before the server started."""

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                if self.client.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert self.loop.poll() is None, self.log.read_text()[-6000:]
            assert time.monotonic() < deadline, self.log.read_text()[-6000:]
            time.sleep(0.5)

    def ask(self) -> str:
        body = {"model": "demo", "prompt": QUESTION, "max_tokens": 4, "temperature": 0}
        return str(self.client.post("/v1/completions", json=body).json()["choices"][0]["text"])

    def worker(self, machine: Machine) -> psutil.Process:
        (found,) = [one for one in machine.processes() if one.name().startswith("ray::RayWorkerProc")]
        return found

    def exits(self) -> list[str]:
        return self.codes.read_text().split() if self.codes.exists() else []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Unix sockets have short paths, and Ray makes some below its folder.
    folder = Path(tmp_path_factory.mktemp("ray"))
    model = build_demo_model(folder / "demo", DemoModelSpec(num_layers=LAYERS, num_heads=4, num_kv_heads=2))
    token = {"RAY_AUTH_MODE": "token"}
    socket, log, codes = folder / "s", folder / "log", folder / "codes"
    size = ["--num-gpus", "1", "--object-store-memory", "100000000"]
    with two_machines(folder) as (first, second):
        first.run([RAY, "get-auth-token", "--generate"])
        (second.home / ".ray").mkdir()
        shutil.copy(first.home / ".ray" / "auth_token", second.home / ".ray" / "auth_token")
        head = ["--head", "--node-ip-address", first.address, "--include-dashboard", "false"]
        temporary = ["--temp-dir", str(folder / "r")]
        first.run([RAY, "start", *head, *size, *temporary], token)
        second.run([RAY, "start", "--address", f"{first.address}:6379", *size], token)
        ray = (set(first.processes()), set(second.processes()))
        options = json.dumps({"fastattention": {"host_kv_layers": HOST_LAYERS}})
        command = [VLLM, "serve", str(model), "--attention-backend", "fastattention", "--tensor-parallel-size", "2"]
        command += ["--distributed-executor-backend", "ray", "--served-model-name", "demo", "--uds", str(socket)]
        command += ["--enforce-eager", "--max-model-len", "4096", "--max-num-batched-tokens", "512"]
        command += ["--additional-config", options]
        script = LOOP.format(socket=socket, codes=codes)
        loop = first.start(
            ["bash", "-c", script, "loop", *command], log, token | {"RAY_ADDRESS": f"{first.address}:6379"}
        )
        transport = httpx.HTTPTransport(uds=str(socket))
        with httpx.Client(transport=transport, base_url="http://server", timeout=120) as client:
            started = Server((first, second), loop, client, log, codes, ray)
            started.wait_until_healthy()
            yield started
    loop.wait(60)


def test_both_machines_answer_and_report_metrics(server: Server) -> None:
    assert server.ask() == "7319"
    deadline = time.monotonic() + 30
    while not all(counted := [attention_bytes(server.client, rank) for rank in (0, 1)]):
        assert time.monotonic() < deadline, counted
        time.sleep(1)
    text = server.client.get("/metrics").text
    for rank, machine in enumerate(server.machines):
        assert re.search(rf'^fastattention:kernels_info{{host="{machine.name}".*rank="{rank}"', text, re.M), text
        assert f'fastattention:attention_layers{{place="host",rank="{rank}"}} {HOST_LAYERS}.0' in text


def attention_bytes(client: httpx.Client, rank: int) -> float:
    pattern = rf'^fastattention:cpu_attention_bytes_total{{rank="{rank}"}} (\S+)$'
    found = re.search(pattern, client.get("/metrics").text, re.M)
    return float(found[1]) if found else 0.0


def test_a_killed_worker_ends_the_server_with_a_reason_and_a_supervisor_restarts_it(server: Server) -> None:
    first, second = server.machines
    body = {"model": "demo", "prompt": QUESTION, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    lines = []
    killed = 0.0
    with server.client.stream("POST", "/v1/completions", json=body) as stream:
        for line in filter(None, stream.iter_lines()):
            lines.append(line)
            if len(lines) == 10:
                server.worker(second).kill()
                killed = time.monotonic()
    assert time.monotonic() - killed < ERROR_S
    assert any('"error"' in line for line in lines[10:]), lines[-3:]
    while not server.exits():
        assert time.monotonic() - killed < END_S, server.log.read_text()[-6000:]
        time.sleep(0.1)
    assert server.exits() == ["1"], server.log.read_text()[-6000:]
    reason = f"the engine died: worker 1 on node2 ({second.address}) ended."
    assert reason in server.log.read_text(), server.log.read_text()[-6000:]

    server.wait_until_healthy()
    assert server.ask() == "7319"
    (api,) = [one for one in first.processes() if one.name() == "vllm"]
    api.terminate()
    assert server.loop.wait(END_S) == 0
    assert server.exits() == ["1", "0"]
    deadline = time.monotonic() + END_S
    while left := leftovers(server):
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def leftovers(server: Server) -> list[str]:
    """What the servers left on either machine: processes besides Ray's own, and shared memory."""
    left = []
    for machine, ray in zip(server.machines, server.ray, strict=True):
        left += [str(one) for one in set(machine.processes()) - ray if one.name() not in RAYS_OWN]
        left += [name for name in machine.shared_memory() if name.startswith(("psm_", "fastattention", "sem."))]
    return left
