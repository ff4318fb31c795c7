"""What README.md and docs/ say to do with `make serve`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks_tested_by
from tests.environment import USER_ENVIRONMENT
from tests.server.conftest import Served

HERE = "tests/server/test_documented.py"


def test_make_serve_runs_what_these_tests_start() -> None:
    """The tests of this folder start scripts/serve.py: `make serve` is the set-up and that."""
    for block in blocks_tested_by(f"{HERE}::{test_make_serve_runs_what_these_tests_start.__name__}"):
        assert block.text == "make serve"
        shown = subprocess.run(
            [*block.text.split(), "PYTHON=python3", "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\n")
        commands = [line for line in shown if line and not line.startswith("make")]
        assert commands == ["python3 scripts/setup_env.py", "exec .venv/bin/python scripts/serve.py"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_question_is_answered(served: Served) -> None:
    (block,) = blocks_tested_by(f"{HERE}::{test_the_question_is_answered.__name__}")
    command = block.text.replace("http://127.0.0.1:8000", served.url)
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
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"] == "2718"
