"""deploy/ray: Ray Serve starts a second replica of the demo under load, and no server is left at the end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from fastattention_vllm.demo.haystack import make_haystack
from fastattention_vllm.demo.model import build_demo_model
from tests.environment import USER_ENVIRONMENT
from tests.server.conftest import ROOT, free_port

PROGRAMS = Path(sys.executable).parent
APPLICATION = ROOT / "deploy" / "ray"
START_S, SCALE_S, END_S = 400, 300, 120
PREFIX = "/demo"
CLIENTS = 6
FAST = {"requests_per_replica": 1, "upscale_delay_s": 2, "cpus_per_replica": 0.5}


def install_what_ray_serve_needs(folder: Path) -> None:
    """The packages of Ray's extra ``serve`` that this environment lacks, into a folder of their own."""
    (ray,) = [pin for pin in (ROOT / "constraints" / "cpu.txt").read_text().split() if pin.startswith("ray==")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints" / "cpu.txt")]
    report = subprocess.check_output([*pip, "--dry-run", "--report", "-", ray.replace("ray", "ray[serve]")], text=True)
    found = [one["metadata"] for one in json.loads(report)["install"]]
    missing = [f"{one['name']}=={one['version']}" for one in found]
    if missing:
        subprocess.run([*pip, "--no-deps", "--target", str(folder), *missing], check=True)


@contextlib.contextmanager
def running(log: Path, environment: dict[str, str], config: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`ray start` and `serve run`, as docs/ray.md has them."""
    ray, serve = str(PROGRAMS / "ray"), [sys.executable, "-m", "ray.serve.scripts"]
    # Unix sockets have short paths, and Ray makes some below its folder.
    temporary = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    port = str(free_port())
    head = ["--head", "--node-ip-address", "127.0.0.1", "--port", port, "--include-dashboard", "false"]
    size = ["--num-cpus", "4", "--object-store-memory", "100000000", "--temp-dir", temporary]
    own = environment | {"RAY_ADDRESS": f"127.0.0.1:{port}"}
    with log.open("wb") as output:
        subprocess.run([ray, "get-auth-token", "--generate"], env=environment, check=True, stdout=output, stderr=output)
        subprocess.run([ray, "start", *head, *size], env=environment, check=True, stdout=output, stderr=output)
        command = [*serve, "run", str(config)]
        process = subprocess.Popen(
            command, env=own, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, preexec_fn=heed_ctrl_c
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        for one in of_session(temporary):
            one.kill()
        shutil.rmtree(temporary, ignore_errors=True)


def heed_ctrl_c() -> None:
    """Runs in the child. Jobs in a shell's background inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def of_session(temporary: str) -> list[psutil.Process]:
    """All processes of the cluster whose files are in this folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(temporary in word for word in process.cmdline()):
                found += [process, *process.children(recursive=True)]
    return found


def servers(temporary: str) -> list[psutil.Process]:
    return [one for one in psutil.process_iter() if is_server(one, temporary)]


def is_server(process: psutil.Process, socket_prefix: str) -> bool:
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        return "--uds" in words and words[words.index("--uds") + 1].startswith(socket_prefix)
    return False


def ask(url: str, number: int) -> str:
    prompt = make_haystack(1500, {"kappa": str(number)}, seed=number, ask="kappa").text
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    return str(answer.raise_for_status().json()["choices"][0]["text"]).strip()


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_a_second_replica_starts_under_load_and_no_server_is_left(tmp_path: Path) -> None:
    install_what_ray_serve_needs(tmp_path / "packages")
    config = yaml.safe_load((APPLICATION / "serve.yaml").read_text())
    port = config["http_options"]["port"] = free_port()
    config["applications"][0]["route_prefix"] = PREFIX
    arguments = config["applications"][0]["args"]
    arguments |= FAST | {"model": str(build_demo_model(tmp_path / "demo"))}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    log, url = tmp_path / "log", f"http://127.0.0.1:{port}{PREFIX}"
    environment = USER_ENVIRONMENT | {
        "HOME": str(tmp_path),  # for a token of its own
        "RAY_AUTH_MODE": "token",
        "PYTHONPATH": f"{APPLICATION}:{tmp_path / 'packages'}",
        "TMPDIR": tempfile.mkdtemp(prefix="s", dir="/tmp"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens on 127.0.0.1 alone
    }
    where = environment["TMPDIR"]
    try:
        with running(log, environment, tmp_path / "serve.yaml") as process:

            def wait(what: str, seconds: float) -> None:
                deadline = time.monotonic() + seconds
                while not (healthy(url) if what == "healthy" else len(servers(where)) == 2):
                    assert process.poll() is None, log.read_text()[-6000:]
                    assert "Exception importing application" not in log.read_text(), log.read_text()[-6000:]
                    assert time.monotonic() < deadline, f"not {what}:\n{log.read_text()[-6000:]}"
                    time.sleep(0.5)

            wait("healthy", START_S)
            assert ask(url, 1234) == "1234"
            assert len(servers(where)) == 1
            status = httpx.get(f"{url}/fastattention/status", timeout=60).raise_for_status().json()
            assert [seen["path"] for seen in status["requests"]["recent"]] == ["/v1/completions"]
            stop = time.monotonic() + SCALE_S
            scaled = False
            with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
                number = 2000
                while not scaled and time.monotonic() < stop:
                    numbers = range(number, number + CLIENTS)
                    assert list(clients.map(lambda n: ask(url, n), numbers)) == [str(n) for n in numbers]
                    number += CLIENTS
                    scaled = len(servers(where)) == 2
            assert scaled, log.read_text()[-6000:]
            process.send_signal(signal.SIGINT)
            process.wait(END_S)
            deadline = time.monotonic() + END_S
            while left := servers(where):
                assert time.monotonic() < deadline, left
                time.sleep(0.5)
    finally:
        for one in servers(where):
            one.kill()
        shutil.rmtree(where, ignore_errors=True)


def healthy(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    return False
