"""Real servers with most of their KV cache in a small pool in host memory: full, side by side, and killed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastattention_vllm.demo.haystack import make_haystack
from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DemoModelSpec
from tests.environment import USER_ENVIRONMENT
from tests.server.conftest import START_TIMEOUT_S, free_port

VLLM = Path(sys.executable).parent / "vllm"
MODEL = DemoModelSpec(num_layers=5, num_heads=2, num_kv_heads=2)
HOST_LAYERS = 4
BLOCK = 16
PAGE = 2 * BLOCK * 2 * 64 * 2
"""Bytes per block of one layer."""
DEVICE_BLOCKS = 8192
HOST_BLOCKS = 300
LENGTH = 2048
LARGE_POOL = 128 << 20
LARGE_BLOCKS = LARGE_POOL // (HOST_LAYERS * PAGE)
assert HOST_BLOCKS < LARGE_BLOCKS < DEVICE_BLOCKS, "each budget must limit the cache"


@dataclass
class Server:
    """A running `vllm serve` in a separate session."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def family(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def pool_holder(self) -> psutil.Process:
        """The largest child process of the API server, which holds the model and the cache."""
        return max(self.family()[1:], key=lambda process: process.memory_info().rss)

    def ask(self, text: str, **options: Any) -> str:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=600, max_retries=0)
        answer = client.completions.create(model="demo", prompt=text, temperature=0, **({"max_tokens": 4} | options))
        return str(answer.choices[0].text).strip()


def question(number: int, tokens: int) -> str:
    """A text that contains ``number`` and asks for it."""
    return make_haystack(tokens, {"kappa": str(number)}, seed=number, ask="kappa").text


@contextlib.contextmanager
def serving(
    model: Path, log: Path, host_kv_gib: float, *more: str, enter: Callable[[], None] | None = None
) -> Iterator[Server]:
    """`vllm serve`, ready for requests. All of its processes are ended afterwards.

    Args:
        enter: called in the server's process before the command runs.
    """
    port = free_port()
    arguments = {
        "served-model-name": "demo",
        "attention-backend": "fastattention",
        "host": "127.0.0.1",
        "port": port,
        "max-model-len": LENGTH,
        "max-num-batched-tokens": 512,
        "block-size": BLOCK,
        "kv-cache-memory-bytes": DEVICE_BLOCKS * PAGE,
        "additional-config": json.dumps({"fastattention": {"host_kv_layers": HOST_LAYERS, "host_kv_gib": host_kv_gib}}),
    }
    flags = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(VLLM), "serve", str(model), "--enforce-eager", *flags, *more],
            env=USER_ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=enter,
        )
    server = Server(process, port, log)
    try:
        wait_until_healthy(server)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(120)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/health", timeout=30).status_code == 200:
                return
        if server.process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"the server did not become ready:\n{server.log.read_text()[-4000:]}")
        time.sleep(0.2)


def gib(blocks: float) -> float:
    """A host budget for this many blocks of all host layers."""
    return blocks * HOST_LAYERS * PAGE / (1 << 30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_demo_model(tmp_path_factory.mktemp("demo") / "demo", MODEL)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose pool holds a few requests."""
    with serving(model, tmp_path_factory.mktemp("server") / "serve.log", gib(HOST_BLOCKS + 0.5)) as running:
        yield running


def ask_at_once(servers: Sequence[Server], questions: Mapping[int, str], **options: Any) -> None:
    """Each question goes to the servers in turn, and each has a different answer."""
    with concurrent.futures.ThreadPoolExecutor(len(questions)) as pool:
        asked = {
            number: pool.submit(servers[index % len(servers)].ask, text, **options)
            for index, (number, text) in enumerate(questions.items())
        }
    answers = {number: answer.result() for number, answer in asked.items()}
    assert [number for number, text in answers.items() if not text.startswith(str(number))] == [], answers


def blocks_and_pool(server: Server) -> tuple[int, float]:
    """Blocks of the KV cache, and GiB of the host layers' pool, from the log."""
    log = server.log.read_text()
    blocks = re.search(rf"(\d+) blocks of {BLOCK} tokens; the longest request", log)
    pool = re.search(r" host +[\d.]+ +([\d.]+)", log)
    assert blocks
    assert pool
    return int(blocks[1]), float(pool[1])


def metric(server: Server, name: str) -> float:
    """The sum over all labels."""
    lines = httpx.get(f"{server.url}/metrics", timeout=120).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}(\{{|_total| )", line))


def test_metrics_show_the_pool_and_what_was_read(server: Server) -> None:
    before = metrics(server)
    assert server.ask(question(41, 700)) == "41"
    time.sleep(1.1)  # for which numbers stay as they are
    after = metrics(server)
    layers = {place: after["attention_layers", ("place", place), ("rank", "0")] for place in ("host", "device")}
    assert layers == {"host": HOST_LAYERS, "device": MODEL.num_layers - HOST_LAYERS}
    used, free = (after["host_pool_bytes", ("rank", "0"), ("state", state)] for state in ("used", "free"))
    assert used + free == HOST_LAYERS * HOST_BLOCKS * PAGE
    read = "cpu_attention_bytes_total", ("rank", "0")
    # Each of the answer's tokens but the first, and perhaps the end of the prompt, is computed by the CPU.
    assert after[read] - before[read] >= HOST_LAYERS * 700 // BLOCK * PAGE
    for name in ("cpu_attention_seconds_total", "device_wait_seconds_total"):
        assert after[name, ("rank", "0")] > before[name, ("rank", "0")]


def metrics(server: Server) -> dict[tuple[Any, ...], float]:
    """This package's metrics, by name without prefix and labels."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).raise_for_status().text
    return {
        (sample.name.removeprefix("fastattention:"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("fastattention:")
    }


def test_requests_that_do_not_fit_together_wait_for_each_other(server: Server) -> None:
    """The pool holds the prompts of three requests, but not all of their answers."""
    tokens = 1500
    assert HOST_BLOCKS // (tokens // BLOCK) == 3
    questions = {number: question(number, tokens) for number in range(1000, 1008)}
    answered = metric(server, "vllm:request_success")
    waiting, running = [], []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_at_once, [server], questions, max_tokens=250, extra_body={"ignore_eos": True})
        while not asking.done():
            waiting.append(metric(server, "vllm:num_requests_waiting"))
            running.append(metric(server, "vllm:num_requests_running"))
            time.sleep(0.1)
        asking.result()
    assert metric(server, "vllm:request_success") == answered + len(questions)
    assert max(running) in (1, 2, 3)
    assert max(waiting) > 0


def test_a_request_over_the_length_is_refused_and_the_next_one_answered(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.ask(question(4711, LENGTH + 1))
    body: Any = caught.value.body
    assert str(LENGTH) in body["message"]
    assert "\n" not in body["message"]
    assert "Traceback" not in server.log.read_text()
    assert server.ask(question(4711, LENGTH - 8)) == "4711"


@pytest.mark.full
def test_a_second_server_has_its_own_pool_which_dies_with_it(server: Server, model: Path, tmp_path: Path) -> None:
    """Both answer at the same time, each within its budget. One is killed, as the kernel does when memory runs out."""
    large = LARGE_POOL / (1 << 30)
    questions = {number: question(number, 900) for number in range(1000, 1008)}
    with serving(model, tmp_path / "second.log", large) as second:
        assert blocks_and_pool(server) == (HOST_BLOCKS, pytest.approx(gib(HOST_BLOCKS), abs=0.001))
        assert blocks_and_pool(second) == (LARGE_BLOCKS, pytest.approx(large, abs=0.001))
        ask_at_once([server, second], questions)
        family, holder = second.family(), second.pool_holder()
        assert resident_bytes(holder, "RssAnon") > LARGE_POOL
        assert resident_bytes(holder, "RssShmem") < LARGE_POOL // 2, "shared memory may outlive its process"
        shared = set().union(*(shared_files(process) for process in family))
        holder.kill()
        assert second.process.wait(120) == 1
        assert "fastattention: the server ended because the engine died: " in second.log.read_text()
        assert psutil.wait_procs(family, timeout=120)[1] == []
        assert [name for name in shared if Path(name).exists()] == []
    assert server.ask(question(1234, 500)) == "1234"
    with serving(model, tmp_path / "third.log", large) as third:
        ask_at_once([server, third], questions)


def resident_bytes(process: psutil.Process, kind: str) -> int:
    found = re.search(rf"^{kind}:\s+(\d+) kB$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) << 10


def shared_files(process: psutil.Process) -> set[str]:
    """Files that a process has in /dev/shm, mapped or open."""
    mapped = {entry.path for entry in process.memory_maps()}
    opened = {os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir() if path.is_symlink()}
    return {name for name in mapped | opened if name.startswith("/dev/shm/")}
