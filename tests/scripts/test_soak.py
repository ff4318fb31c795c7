"""`make soak` for a minute, and the failures that it must detect."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from scripts import soak, soak_load, soak_report, soak_server
from tests.environment import USER_ENVIRONMENT
from tests.server.conftest import ROOT


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.soak", *arguments]
    return subprocess.run(command, cwd=ROOT, env=USER_ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.mark.more
@pytest.mark.timeout(1800)
def test_a_minute_of_mixed_load(tmp_path: Path) -> None:
    done = run("--seconds", "60", "--json", str(tmp_path / "soak.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["failures"] == []
    assert set(result["done"]) == {"needle", "stream", "drop", "drop_early", "bad"}
    assert {"hardware", "versions", "date", "rows"} <= set(result)


def test_a_number_that_is_too_small_is_refused() -> None:
    done = run("--seconds", "0")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("--seconds 0.0 is too small; use 1 or more.")


@pytest.mark.parametrize(
    ("after", "grown"),
    [
        (soak_report.Quiet(10**9, 100, 50), []),
        (soak_report.Quiet(10**9 + 2 * soak_report.MORE_BYTES, 100, 50), ["memory_bytes"]),
        (soak_report.Quiet(10**9, 101 + soak_report.MORE_DESCRIPTORS, 50), ["descriptors"]),
        (soak_report.Quiet(10**9, 100, 51 + soak_report.MORE_THREADS), ["threads"]),
    ],
)
def test_growing_numbers_are_a_failure(after: soak_report.Quiet, grown: list[str]) -> None:
    result = soak_report.Result(60.0, quiet=[soak_report.Quiet(10**9, 100, 50), after])
    soak_report.compare(result)
    assert [failure.split()[0] for failure in result.failures] == grown


def test_a_wrong_answer_is_a_failure() -> None:
    result = soak_report.Result(60.0)
    load = soak_load.Load("http://127.0.0.1:1", argparse.Namespace(tokens=64, clients=1), result, seed=0, bad=[])
    load.check(" 1234", "1234")
    assert result.failures == []
    load.check("1235", "1234")
    assert result.failures == ["the answer is '1235', but 1234 was in the text"]


def test_a_server_that_dies_is_the_only_failure() -> None:
    result = soak_report.Result(60.0, failures=["an earlier one"])

    async def ask_for_ever() -> None:
        while True:
            result.failures.append("connection refused")
            await asyncio.sleep(0.01)

    process = psutil.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    assert not asyncio.run(soak_server.unless_it_dies(process, ask_for_ever(), result))
    assert result.failures == ["an earlier one", "the server died with exit code 3"]


def test_a_server_that_cannot_start_is_reported_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    done = run("--seconds", "1", "--log", str(log), "--server-arguments=--no-such-option")
    assert done.returncode == 1
    assert "FAILED: the server died with exit code 2" in done.stdout
    assert "--no-such-option" in log.read_text()
    assert "--no-such-option" in done.stdout


def test_the_first_traceback_and_the_end_of_a_log_are_shown() -> None:
    first, second = (f"Traceback (most recent call last):\n{name}\n" for name in ("OneError", "OtherError"))
    shown = soak.excerpt("begin\n" + first + "x" * 20_000 + second + "y" * 20_000 + "the end")
    assert shown.startswith(first)
    assert "OtherError" not in shown
    assert shown.endswith("the end")
