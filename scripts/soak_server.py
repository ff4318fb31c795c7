"""The server of a soak: starting, counting, watching and stopping it.

Used by: soak.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from fastattention_vllm.demo.haystack import make_haystack
from scripts.serve import BIN, ROOT
from scripts.soak_report import END_S, Quiet, Result

START_TIMEOUT_S = 600
QUIET_TIMEOUT_S = 300
LONG_TOKENS = 60_000


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


async def unless_it_dies(process: psutil.Popen, work: Coroutine[Any, Any, None], result: Result) -> bool:
    """Whether ``work`` was done. If the server dies meanwhile, only that is reported as a failure."""
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


async def nothing_runs(url: str) -> bool:
    """Whether the server becomes idle in time. It notices dropped requests only between two steps."""
    deadline = time.monotonic() + QUIET_TIMEOUT_S
    while time.monotonic() < deadline:
        if await requests(url) == 0:
            return True
        await asyncio.sleep(0.5)
    return False


async def requests(url: str, *names: str) -> int:
    """Running and waiting requests, as counted by the server."""
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"{url}/metrics", timeout=120)).text
    names = names or ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(int(float(line.split()[-1])) for line in text.splitlines() if line.split("{")[0] in names)


def count(process: psutil.Popen) -> Quiet:
    total = Quiet(0, 0, 0)
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total.memory_bytes += own_memory(one.pid)
            total.descriptors += one.num_fds()
            total.threads += one.num_threads()
    return total


def own_memory(pid: int) -> int:
    """Bytes of a process's anonymous and shared memory; pages that it shares with others count in part.

    Pages of files are left out: how much of a library counts depends on which other processes map it.
    """
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in rollup.splitlines()[1:])}
    return (kib["Pss_Anon"] + kib["Pss_Shmem"]) << 10


async def end(process: psutil.Popen, url: str, result: Result) -> None:
    """SIGTERM while long requests run."""
    family = process.children(recursive=True)
    segments = {path for one in [process, *family] for path in shared_memory(one)}
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        asked = [asyncio.create_task(long_request(client, seed)) for seed in range(4)]
        while await requests(url, "vllm:num_requests_running") < 1:
            if all(one.done() for one in asked):
                result.failures.append("the long requests ended before the server was told to")
                break
            await asyncio.sleep(0.1)
        began = time.monotonic()
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, END_S)
        except psutil.TimeoutExpired:
            result.failures.append(f"the server still runs {END_S} s after SIGTERM")
            process.kill()
        result.end_seconds = time.monotonic() - began
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, max(1.0, END_S - result.end_seconds))
        answers = await asyncio.gather(*asked)
    result.told = sum(answers)
    if not all(answers):
        result.failures.append(f"{len(answers) - result.told} clients took an answer that was cut off for a whole one")
    result.failures += [f"process {one.pid} is left: {one}" for one in alive]
    result.failures += [f"{path} is left" for path in sorted(segments) if Path(path).exists()]


def shared_memory(process: psutil.Process) -> set[str]:
    """Named shared memory segments that a process has mapped and that still have a name."""
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
