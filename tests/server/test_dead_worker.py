"""A worker of a real server is killed: the server names it, and exits with status 1."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.server.test_ending import serving

END_S = 120


@pytest.mark.more
@pytest.mark.timeout(900)
def test_a_server_names_the_worker_that_was_killed(tmp_path: Path) -> None:
    """vLLM's default executor, as users run it, with two ranks."""
    log = tmp_path / "serve.log"
    with serving("vllm.entrypoints.cli.main", log, "--enforce-eager", "--tensor-parallel-size", "2") as (process, _):
        family = psutil.Process(process.pid).children(recursive=True)
        (worker,) = [one for one in family if "Worker_TP1" in " ".join(one.cmdline())]
        worker.send_signal(signal.SIGKILL)
        assert process.wait(END_S) == 1
        assert psutil.wait_procs(family, timeout=END_S)[1] == []
    reason = (
        rf"the server ended because the engine died: worker 1 on \S+ \(process {worker.pid}\) was ended by SIGKILL\."
    )
    assert re.search(reason, log.read_text().splitlines()[-1]), log.read_text()[-3000:]
