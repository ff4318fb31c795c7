"""A vLLM server as its users meet it: started, asked over HTTP, timed token by token, stopped.

Used by: benchmarks/serve_cpu.py and benchmarks/serve_gpu.py.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

HOST = "127.0.0.1"
START_SECONDS = 1200.0
"""vLLM computes a step of the largest size before it is ready, which takes a slow CPU build minutes."""
ANSWER_SECONDS = 600.0
"""How long the first token of a long prompt may take."""

Arrivals = list[tuple[float, int]]
"""For each piece of a streamed answer, when it came and how many tokens there were by then."""


class ServerError(RuntimeError):
    """A server that does not start, or does not answer as asked; one sentence and the end of its log."""


class Server:
    """``command`` plus host and port, in a process group of its own."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name, self.log = name, log
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = int(probe.getsockname()[1])
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--host", HOST, "--port", str(self.port)],
                cwd=log.parent,  # `python -m` looks there first: not into a checkout of this package
                env=dict(environment),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise self.error("did not get ready")
            time.sleep(0.5)

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def error(self, what: str) -> ServerError:
        return ServerError(f"the server of {self.name} {what}; the end of its log:\n{self.log.read_text()[-3000:]}")

    def stream(
        self, prompt: Sequence[int], tokens: int, started: threading.Barrier | None = None, temperature: float = 0.0
    ) -> Arrivals:
        """Ask for exactly ``tokens`` tokens after ``prompt`` (token ids), together with the others of ``started``."""
        wanted = {
            "prompt": list(prompt),
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        body = json.dumps(wanted)
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_SECONDS)
        try:
            if started:
                started.wait()
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise self.error(f"answered {response.status}: {response.read(500)!r}")
            arrivals: Arrivals = []
            for count in _token_counts(response):
                if count > (arrivals[-1][1] if arrivals else 0):
                    arrivals.append((time.perf_counter(), count))
        finally:
            connection.close()
        if not arrivals or arrivals[-1][1] != tokens:
            raise self.error(f"sent {arrivals[-1][1] if arrivals else 0} tokens instead of {tokens}")
        return arrivals

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float = 0.0) -> float:
        """Ask for all ``prompts`` at the same time; seconds from token to token while all of them decode."""
        started = threading.Barrier(len(prompts))
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = [pool.submit(self.stream, prompt, tokens, started, temperature) for prompt in prompts]
            return inter_token_seconds([answer.result() for answer in answers])

    def cpu_seconds(self) -> float:
        """CPU time of this server's processes so far."""
        used = 0.0
        for process in [psutil.Process(self.process.pid), *self._children()]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            used += times.user + times.system
        return used

    def _children(self) -> list[psutil.Process]:
        try:
            return list(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        family = self._children()
        if self.process.poll() is None:
            self.process.terminate()  # SIGINT is ignored where a shell has started all this in the background
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for process in psutil.wait_procs(family, timeout=5)[1]:
            process.kill()


def _token_counts(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[int]:
    """How many tokens were complete at each event of an OpenAI stream of completions."""
    for line in lines:
        data = line.removeprefix(b"data:").strip()
        if data and data != b"[DONE]":
            usage = json.loads(data).get("usage")
            yield usage["completion_tokens"] if usage else 0


def inter_token_seconds(streams: Sequence[Arrivals]) -> float:
    """The median time from one token to the next, over the time in which every stream was being answered.

    An event may carry several tokens, where the server's HTTP side is behind: its time counts for each of them.

    Raises ``ValueError`` if the streams did not overlap.
    """
    begin = max(stream[0][0] for stream in streams)
    end = min(stream[-1][0] for stream in streams)
    gaps = [
        (later - earlier) / (after - before)
        for stream in streams
        for (earlier, before), (later, after) in itertools.pairwise(stream)
        if earlier >= begin and later <= end
        for _ in range(after - before)
    ]
    if not gaps:
        raise ValueError("the requests were not answered at the same time; ask for more tokens.")
    return statistics.median(gaps)


def foreign_share(used_by_machine: float, used_by_us: float, seconds: float) -> float:
    """What part of one CPU went to processes other than ours, from CPU seconds of the machine and of ours."""
    return max(0.0, used_by_machine - used_by_us) / seconds


def machine_cpu_seconds() -> float:
    """CPU time that anyone has used on this machine so far."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def own_cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system
