"""A user's own stop looks like one: nothing in the log is a failure, and nothing is left in shared memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server.test_ending import serving

END_S = 120
FAILURES = ("Traceback", "ERROR", "EngineDeadError", "leaked")


@pytest.mark.more
@pytest.mark.timeout(900)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=lambda one: one.name)
def test_a_stop_of_all_processes_at_once_is_quiet(signum: signal.Signals, tmp_path: Path) -> None:
    """The signal goes to the whole group, as from Ctrl-C in a terminal, while one request streams."""
    log = tmp_path / "serve.log"
    body = {"model": "demo", "prompt": "delta=4711.", "max_tokens": 60_000, "ignore_eos": True, "stream": True}
    arguments = ("--enforce-eager", "--tensor-parallel-size", "2")
    with serving("vllm.entrypoints.cli.main", log, *arguments) as (process, url):
        family = psutil.Process(process.pid).children(recursive=True)
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=None) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert next(lines).startswith("data: ")
            assert names([process.pid, *(one.pid for one in family)]) == []
            before = log.stat().st_size
            os.killpg(process.pid, signum)
            *_, last, done = lines
        assert process.wait(END_S) == 0
        assert psutil.wait_procs(family, timeout=END_S)[1] == []
    assert done == "data: [DONE]"
    assert "The server was stopped" in last
    said = log.read_text()[before:]
    assert [one for one in FAILURES if one in said] == [], said


def names(processes: list[int]) -> list[str]:
    """Shared memory and semaphores of Python that would stay in /dev/shm if these processes were killed."""
    maps = "".join(Path(f"/proc/{process}/maps").read_text() for process in processes).splitlines()
    return [line for line in maps if "/dev/shm/" in line and not line.endswith("(deleted)")]
