"""Upstream's backend tests for the installed vLLM; `make conformance` runs all of them, in several versions."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from scripts import conformance, conformance_env
from scripts.conformance import SUITES, Suite, run_suite, table


@pytest.mark.more
@pytest.mark.timeout(1800)
def test_all_but_the_large_batches_pass() -> None:
    version = metadata.version("vllm")
    folder = conformance_env.HOME / f"{version}-installed"
    upstream = folder / "upstream"
    if not upstream.exists():
        sdist = conformance_env.fetch_sdist(Path(sys.executable), version, folder / "sdist", folder / "setup.log")
        conformance_env.unpack_tests(sdist, upstream)
    whole = SUITES[0]
    suite = Suite(whole.name, whole.file, f"{whole.select} and not large")
    result = run_suite(suite, Path(sys.executable), folder, upstream, version)
    assert conformance.exit_status([result]) == 0, table([result])
    # 24 causal, 9 sliding window, 4 encoder-only, 3 non-causal. A smaller number means that the selection is wrong.
    assert result.passed >= 35, table([result])
