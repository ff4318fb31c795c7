"""Serve the demo model under mixed load for a while, and check answers, resource use and shutdown.

Clients ask for needles in texts of many lengths, with and without streaming, drop their connections, and send bad
input. Every answer must be right. Memory, file descriptors and threads of all server processes are counted twice while
no request runs, after the first third and at the end, and must not have grown. Finally the server gets SIGTERM while
long requests are in flight: their clients must receive an error, and within 10 seconds the server must have ended
without leaving processes or shared memory behind.

    python -m scripts.soak --seconds 300 --server-arguments "--dtype bfloat16 --additional-config '{JSON}'"
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from fastattention_vllm.demo.haystack import make_haystack
from scripts.serve import BIN, CONFIG, HOST, ROOT, build_model_if_needed, free_port

START_TIMEOUT_S = 600
QUIET_TIMEOUT_S = 300
END_S = 10
MAX_REQUESTS = 200_000
LONG_TOKENS = 60_000
EXCERPT = 8000
"""Number of characters of the log that are shown."""
CHUNKS_BEFORE_A_DROP = 3
MORE_MEMORY = 0.05
MORE_BYTES = 96 << 20
"""Bytes that allocators may keep, in addition to the fraction ``MORE_MEMORY`` of the total."""
MORE_THREADS = 8
"""The thread pools of asyncio and the tokenizer grow on demand."""
MORE_DESCRIPTORS = 4
BAD: list[tuple[str, Any]] = [
    ("/v1/completions", {"model": "demo", "prompt": "alpha=", "max_tokens": -1}),
    ("/v1/completions", {"model": "demo", "prompt": "alpha=", "temperature": -1}),
    ("/v1/completions", {"model": "demo", "prompt": [10**9]}),
    ("/v1/completions", {"model": "none", "prompt": "alpha="}),
    ("/v1/completions", {"model": "demo", "prompt": [5] * 70_000, "max_tokens": 4}),
    ("/v1/chat/completions", {"model": "demo", "messages": "alpha"}),
    ("/v1/chat/completions", "no JSON object"),
]


@dataclass
class Quiet:
    """The resources of all server processes together, while no request runs."""

    memory_bytes: int
    descriptors: int
    threads: int


@dataclass
class Result:
    seconds: float
    done: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    quiet: list[Quiet] = field(default_factory=list)
    end_seconds: float = 0.0
    told: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="duration of the load, without start and shutdown")
    parser.add_argument("--clients", type=int, default=8, help="number of clients at the same time")
    parser.add_argument("--tokens", type=int, default=8_000, help="length of the longest needle texts under load")
    parser.add_argument("--server-arguments", default="", help="additional arguments for `vllm serve`, as one string")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random requests")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--log", type=Path, help="write the server's log to this file")
    options = parser.parse_args()
    for name, minimum in [("seconds", 1), ("clients", 1), ("tokens", 64)]:
        if getattr(options, name) < minimum:
            parser.error(f"--{name} {getattr(options, name)} is too small; use {minimum} or more.")
    build_model_if_needed()
    command = ["serve", "--config", str(CONFIG), "--host", HOST, "--port", str(free_port())]
    command += shlex.split(options.server_arguments)
    with tempfile.TemporaryDirectory() as folder:
        log = options.log or Path(folder) / "serve.log"
        with served(command, log) as process:
            result = asyncio.run(soak(process, command, options))
        if result.failures:
            print(excerpt(log.read_text(errors="replace")))
    report(result, options, command)
    return 1 if result.failures else 0


def excerpt(log: str) -> str:
    """The first traceback of any process with the text after it, and the end of the log."""
    first = log.find("Traceback (most recent call last)")
    begin = log[first : first + EXCERPT] if first >= 0 else "The server's log has no traceback."
    return f"{begin}\n[... the log's last {EXCERPT} characters:]\n{log[-EXCERPT:]}"


@contextlib.contextmanager
def served(command: list[str], log: Path) -> Iterator[psutil.Popen]:
    with log.open("wb") as output:
        process = psutil.Popen(
            [str(BIN / "vllm"), *command], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def soak(process: psutil.Popen, command: list[str], options: argparse.Namespace) -> Result:
    result = Result(options.seconds)
    url = f"http://{HOST}:{command[command.index('--port') + 1]}"
    if not await healthy(process, url):
        code = process.poll()
        why = "the server did not start in time" if code is None else f"the server died with exit code {code}"
        result.failures.append(why)
        return result
    unasked = await bodies_that_vllm_itself_fails_on(url)
    for _, body in unasked:
        print(f"vLLM itself answers {body!r} with status 500, so it is left out of the load.", flush=True)
    # The first third fills pools and caches. After that, nothing may grow.
    for number, part in enumerate((1 / 3, 2 / 3)):
        load = Load(url, options, result, seed=options.seed + number, bad=[one for one in BAD if one not in unasked])
        if not await unless_it_dies(process, load.run(part * options.seconds), result):
            return result
        if not await nothing_runs(url):
            result.failures.append("a request is still running although no client waits for it")
        result.quiet.append(count(process))
        say(result)
    compare(result)
    await end(process, url, result)
    return result


async def unless_it_dies(process: psutil.Popen, work: Coroutine[Any, Any, None], result: Result) -> bool:
    """Whether ``work`` finished. If the server dies, this is reported instead of the clients' errors."""
    before = len(result.failures)
    task = asyncio.create_task(work)
    while not task.done() and process.poll() is None:
        await asyncio.wait([task], timeout=0.2)
    if process.poll() is None:
        await task
        return True
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    result.failures[before:] = [f"the server died with exit code {process.poll()}"]
    return False


async def healthy(process: psutil.Popen, url: str) -> bool:
    deadline = time.monotonic() + START_TIMEOUT_S
    async with httpx.AsyncClient(trust_env=False) as client:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"{url}/health", timeout=30)).status_code == 200:
                    return True
            await asyncio.sleep(0.5)
    return False


async def bodies_that_vllm_itself_fails_on(url: str) -> list[tuple[str, Any]]:
    """JSON texts that are not objects. The API server of vLLM 0.23 answers them with 500 and closes the connection.

    This happens before any engine or plugin sees the request. vLLM 0.32 no longer does this.
    """
    failing = []
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        for path, body in BAD:
            if not isinstance(body, dict) and (await client.post(path, json=body)).status_code == 500:
                failing.append((path, body))
    return failing


class Load:
    """Clients that ask, stream, drop connections and send errors. Each client does one thing at a time."""

    def __init__(
        self, url: str, options: argparse.Namespace, result: Result, seed: int, bad: list[tuple[str, Any]]
    ) -> None:
        self.url = url
        self.bodies = bad
        self.options = options
        self.result = result
        self.random = random.Random(seed)

    async def run(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        # vLLM closes connections after 5 s of idle time. A connection that is reused at that moment is reset.
        reuse = httpx.Limits(keepalive_expiry=2)
        async with httpx.AsyncClient(base_url=self.url, timeout=None, trust_env=False, limits=reuse) as self.client:
            await asyncio.gather(*(self.ask_on() for _ in range(self.options.clients)))

    async def ask_on(self) -> None:
        kinds = [self.needle, self.stream, self.drop, self.drop_early, self.bad]
        while time.monotonic() < self.deadline and sum(self.result.done.values()) < MAX_REQUESTS:
            (kind,) = self.random.choices(kinds, weights=[10, 5, 2, 2, 2])
            try:
                await kind()
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                self.failed(f"{kind.__name__}: {error!r}")
                await asyncio.sleep(1)
            self.result.done[kind.__name__] = self.result.done.get(kind.__name__, 0) + 1

    def failed(self, what: str) -> None:
        if len(self.result.failures) < 20:
            self.result.failures.append(what)

    def question(self) -> tuple[dict[str, Any], str]:
        value = str(self.random.randrange(1000, 10_000))
        # Lengths from a few tokens to the longest, as many short ones as long ones.
        tokens = int(64 * (self.options.tokens / 64) ** self.random.random())
        seed, depth = self.random.randrange(10**6), self.random.random()
        text = make_haystack(tokens, {"alpha": value}, depths=[depth], ask="alpha", seed=seed).text
        return {"model": "demo", "prompt": text, "max_tokens": 4, "temperature": 0}, value

    async def needle(self) -> None:
        body, value = self.question()
        answer = await self.client.post("/v1/completions", json=body)
        self.check(answer.json()["choices"][0]["text"], value)

    async def stream(self) -> None:
        body, value = self.question()
        text = ""
        async with self.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        self.check(text, value)

    def check(self, text: str, value: str) -> None:
        if text.strip() != value:
            self.failed(f"the answer is {text.strip()!r}, but {value} was in the text")

    async def drop(self) -> None:
        """Disconnect in the middle of a long answer."""
        body, _ = self.question()
        body |= {"stream": True, "ignore_eos": True, "max_tokens": 4000}
        chunks = 0
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                chunks += 1
                if chunks == CHUNKS_BEFORE_A_DROP:
                    return
        self.failed(f"a stream of 4000 tokens ended after {chunks} chunks")

    async def drop_early(self) -> None:
        """Disconnect before there is an answer, at any stage of the prompt."""
        body, _ = self.question()
        with contextlib.suppress(httpx.TimeoutException):
            await self.client.post("/v1/completions", json=body, timeout=self.random.uniform(0.01, 0.5))

    async def bad(self) -> None:
        path, body = self.random.choice(self.bodies)
        answer = await self.client.post(path, json=body)
        if not 400 <= answer.status_code < 500:
            self.failed(f"{str(body)[:80]} was answered with {answer.status_code}")


async def nothing_runs(url: str) -> bool:
    """Whether the server becomes idle in time. It notices dropped requests between two steps."""
    deadline = time.monotonic() + QUIET_TIMEOUT_S
    while time.monotonic() < deadline:
        if await requests(url) == 0:
            return True
        await asyncio.sleep(0.5)
    return False


async def requests(url: str, *names: str) -> int:
    """Number of running or waiting requests, as counted by the server."""
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"{url}/metrics", timeout=120)).text
    names = names or ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(int(float(line.split()[-1])) for line in text.splitlines() if line.split("{")[0] in names)


def count(process: psutil.Popen) -> Quiet:
    total = Quiet(0, 0, 0)
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            # Not the resident size, which would count pages that processes share several times.
            total.memory_bytes += one.memory_full_info().pss
            total.descriptors += one.num_fds()
            total.threads += one.num_threads()
    return total


def compare(result: Result) -> None:
    before, after = result.quiet
    for what, limit in [
        ("memory_bytes", int(MORE_MEMORY * before.memory_bytes) + MORE_BYTES),
        ("descriptors", MORE_DESCRIPTORS),
        ("threads", MORE_THREADS),
    ]:
        old, new = getattr(before, what), getattr(after, what)
        if new - old > limit:
            result.failures.append(f"{what} grew from {old} to {new}, which is more than the allowed {limit}")


async def end(process: psutil.Popen, url: str, result: Result) -> None:
    """Send SIGTERM while long requests run."""
    family = process.children(recursive=True)
    segments = {path for one in [process, *family] for path in shared_memory(one)}
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        asked = [asyncio.create_task(long_request(client, seed)) for seed in range(4)]
        while await requests(url, "vllm:num_requests_running") < 1:
            if all(one.done() for one in asked):
                result.failures.append("the long requests ended before SIGTERM was sent")
                break
            await asyncio.sleep(0.1)
        began = time.monotonic()
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, END_S)
        except psutil.TimeoutExpired:
            result.failures.append(f"the server was still running {END_S} s after SIGTERM")
            process.kill()
        result.end_seconds = time.monotonic() - began
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, max(1.0, END_S - result.end_seconds))
        answers = await asyncio.gather(*asked)
    result.told = sum(answers)
    if not all(answers):
        result.failures.append(f"{len(answers) - result.told} clients received a truncated answer that looks complete")
    result.failures += [f"process {one.pid} was left behind: {one}" for one in alive]
    result.failures += [f"{path} was left behind" for path in sorted(segments) if Path(path).exists()]


def shared_memory(process: psutil.Process) -> set[str]:
    """The shared-memory segments that a process has mapped and that still have a name."""
    try:
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
    return {path for path in paths if not path.endswith(" (deleted)")}


async def long_request(client: httpx.AsyncClient, seed: int) -> bool:
    """Whether the client got an error for its request."""
    text = make_haystack(LONG_TOKENS, {"alpha": "7319"}, depths=[0.5], ask="alpha", seed=seed).text
    body = {"model": "demo", "prompt": text, "max_tokens": 4000, "ignore_eos": True, "stream": seed % 2 == 1}
    try:
        answer = await client.post("/v1/completions", json=body)
    except httpx.TransportError:
        return True
    return answer.status_code >= 500 or '"error"' in answer.text or '"finish_reason":"abort"' in answer.text


def say(result: Result) -> None:
    quiet = result.quiet[-1]
    done = ", ".join(f"{number} {kind}" for kind, number in sorted(result.done.items()))
    print(
        f"{done}; {quiet.memory_bytes / 2**20:.0f} MiB, {quiet.descriptors} descriptors, {quiet.threads} threads",
        flush=True,
    )


def report(result: Result, options: argparse.Namespace, command: list[str]) -> None:
    for failure in result.failures:
        print(f"FAILED: {failure}")
    if not result.failures:
        print(
            f"Passed; the server ended {result.end_seconds:.1f} s after SIGTERM and {result.told} clients got an error."
        )
    if options.json:
        options.json.write_text(json.dumps(described(result, command), indent=1) + "\n")


def described(result: Result, command: list[str]) -> dict[str, object]:
    import torch

    from fastattention_vllm.bench import machine

    hardware = machine.hardware(len(os.sched_getaffinity(0)))
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.get_device_name()}; {hardware}"
    return {
        "hardware": hardware,
        "versions": machine.versions(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": ["vllm", *(word.replace(f"{ROOT}/", "") for word in command)],
        "rows": rows(result),
        **asdict(result),
    }


def rows(result: Result) -> list[dict[str, object]]:
    """Rows in the format of benchmarks/results: the end of the run against its first third, and the time to stop."""
    case = f"soak {result.seconds:.0f} s, {sum(result.done.values())} requests"
    peer = "after the first third"
    found = []
    if len(result.quiet) == 2:
        before, after = (asdict(quiet) for quiet in result.quiet)
        units = {"memory_bytes": "bytes", "descriptors": "descriptors", "threads": "threads"}
        found = [row(case, f"serve {name}", unit, after[name], before[name], peer) for name, unit in units.items()]
    ended = row(case, "serve end after SIGTERM", "s", result.end_seconds)
    return [*found, ended | {"limit": END_S}]


def row(case: str, metric: str, unit: str, ours: float, peer: float | None = None, name: str = "") -> dict[str, object]:
    ratio = None if peer is None else peer / ours
    return {
        "case": case,
        "metric": metric,
        "unit": unit,
        "ours": ours,
        "peer_name": name or None,
        "peer": peer,
        "ratio": ratio,
        "limit": None,
        "fraction_of_limit": None,
    }


if __name__ == "__main__":
    sys.exit(main())
