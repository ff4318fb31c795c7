"""pytest plugin: one JSON entry per test, written to the file that CONFORMANCE_RESULT names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

_entries: dict[str, dict[str, str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # The call decides the result of a test, unless setup or teardown failed.
    if report.when == "call" or report.outcome != "passed":
        _entries[report.nodeid] = {"outcome": report.outcome, "why": _why(report)}


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _entries[report.nodeid] = {"outcome": "failed", "why": _why(report)}


def pytest_sessionfinish() -> None:
    Path(os.environ["CONFORMANCE_RESULT"]).write_text(json.dumps(_entries, indent=1))


def _why(report: Any) -> str:
    """The reason of a skip, or the beginning and the end of an error message. The end usually names the cause."""
    if report.outcome == "passed":
        return ""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = " ".join(str(crash.message if crash else report.longrepr).split())
    return text if len(text) < 400 else f"{text[:150]} ... {text[-250:]}"
