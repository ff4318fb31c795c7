"""The commands that README.md and docs/ give for `make serve`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, blocks_tested_by
from tests.environment import USER_ENVIRONMENT
from tests.server.conftest import READY, Served, free_port

HERE = "tests/server/test_documented.py"


def test_make_serve_runs_what_these_tests_start() -> None:
    """The tests of this folder start scripts/serve.py; `make serve` runs the set-up and the same script."""
    for block in blocks_tested_by(f"{HERE}::{test_make_serve_runs_what_these_tests_start.__name__}"):
        assert block.text == "make serve"
        shown = subprocess.run(
            [*block.text.split(), "PYTHON=python3", "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\n")
        commands = [line for line in shown if line and not line.startswith("make")]
        assert commands == ["python3 scripts/setup_env.py", "exec .venv/bin/python scripts/serve.py"]


def ask(block: Block, url: str) -> str:
    command = block.text.replace("http://127.0.0.1:8000", url)
    assert command != block.text
    environment = USER_ENVIRONMENT | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    answer = subprocess.run(
        ["bash", "-c", f"{command} --noproxy '*' --silent"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return str(json.loads(answer.stdout)["choices"][0]["message"]["content"])


QUESTION = f"{HERE}::test_the_question_is_answered"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_question_is_answered(served: Served) -> None:
    (block,) = blocks_tested_by(QUESTION)
    assert ask(block, served.url) == "2718"


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_two_commands_of_the_readme_in_a_fresh_clone(tmp_path: Path) -> None:
    """The two commands of the README in a fresh clone, so that only files in git are installed, built and served."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    port, log = free_port(), tmp_path / "log"
    python = Path(sys.base_prefix) / "bin" / "python3"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["make", "serve", f"PORT={port}", f"PYTHON={python}"],
            cwd=clone,
            env=USER_ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while READY not in log.read_text():
            assert process.poll() is None, log.read_text()[-4000:]
            time.sleep(1)
        (block,) = blocks_tested_by(QUESTION)
        assert ask(block, f"http://127.0.0.1:{port}") == "2718"
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)  # make reports the interruption, not the server's exit status
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
