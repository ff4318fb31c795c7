"""Counts, output and exit status of scripts/conformance.py. The suites themselves run in `make conformance`."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from scripts import conformance, conformance_env, vllm_surface
from scripts.conformance import Result, Suite, exit_status, read_result, run_suite, table
from scripts.setup_env import SetupError


def result(**counts: Any) -> Result:
    return Result("0.28.0", "2.13.0", "a suite", **counts)


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ([result(passed=3)], 0),
        ([result(passed=3, not_run=2)], 0),
        ([result(passed=3), result(passed=2, failed=1)], 1),
        ([result(passed=3), result()], 1),
        ([result(not_run=5)], 1),
        ([], 1),
    ],
)
def test_only_passed_tests_are_a_success(results: list[Result], status: int) -> None:
    assert exit_status(results) == status


def test_the_table_has_all_numbers_failures_and_reasons_of_skips() -> None:
    text = table(
        [
            result(
                passed=41, failed=2, not_run=7, seconds=63.4, problems=["case[a]: off by 2", "case[b]: NaN"],
                skips=["x[1]: needs a GPU", "x[2]: needs a GPU"],
            ),
            result(),
        ]
    )  # fmt: skip
    row = next(line for line in text.splitlines() if "41" in line)
    assert row.split() == ["0.28.0", "2.13.0", "a", "suite", "50", "41", "2", "7", "63"]
    assert "FAILED 0.28.0 a suite: case[a]: off by 2" in text
    assert "FAILED 0.28.0 a suite: case[b]: NaN" in text
    assert text.count("needs a GPU") == 1
    assert "no test passed" in text


def test_a_run_that_breaks_off_is_a_failure(tmp_path: Path) -> None:
    broken = read_result(tmp_path / "absent.json", result(), tmp_path / "log")
    assert not broken.ok
    assert "broke off" in broken.problems[0]


@pytest.fixture
def suite_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs real pytest, with this interpreter, on a file with the given text."""
    monkeypatch.setattr(conformance, "installed_torch", lambda python: "2.13.0")

    def run(text: str, select: str = "") -> Result:
        (tmp_path / "test_file.py").write_text(text)
        suite = Suite("a suite", str(tmp_path / "test_file.py"), select, adapts_upstream=False)
        return run_suite(suite, Path(sys.executable), tmp_path, tmp_path / "upstream", "0.28.0")

    return run


def test_every_outcome_of_a_real_run_is_counted(suite_of: Any) -> None:
    counted = suite_of(
        "import pytest\n"
        "def test_good(): pass\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_bad(n): assert n == 3\n"
        "def test_skipped(): pytest.skip('not here')\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError('broken fixture')\n"
        "def test_error(broken): pass\n"
    )
    assert (counted.passed, counted.failed, counted.not_run) == (1, 3, 1)
    assert not counted.ok
    assert any("broken fixture" in problem for problem in counted.problems)
    assert any("assert 1 == 3" in problem for problem in counted.problems)
    assert counted.skips == ["test_skipped: not here"]


def test_a_file_that_does_not_import_is_a_failure(suite_of: Any) -> None:
    assert suite_of("import no_such_module\ndef test_good(): pass\n").failed == 1


def test_a_run_that_ends_half_way_is_a_failure(suite_of: Any) -> None:
    ended = suite_of(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_ends(): pytest.exit('out of something')\n"
        "def test_never_run(): assert False\n"
    )
    assert (ended.passed, ended.failed) == (1, 1)
    assert "pytest ended with status" in ended.problems[0]


def test_a_selection_that_matches_nothing_is_not_a_success(suite_of: Any) -> None:
    nothing = suite_of("def test_good(): pass\n", select="no_such_name")
    assert not nothing.ok
    assert exit_status([nothing]) == 1


def test_a_failed_setup_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(self: object) -> None:
        raise SetupError("pip failed")

    monkeypatch.setattr(conformance.Environment, "prepare", fail)
    assert conformance.main(["--versions", "0.28.0"]) == 1
    assert capsys.readouterr().err == "fastattention conformance: pip failed\n"


def test_results_are_written_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(conformance.Environment, "prepare", lambda self: None)
    monkeypatch.setattr(conformance, "run_suite", lambda suite, *rest: Result(rest[-1], "2.13.0", suite.name, passed=1))
    assert conformance.main(["--versions", "0.19.1", "0.28.0", "--json", str(tmp_path / "kept.json")]) == 0
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert [row["version"] for row in kept] == ["0.19.1"] * 8 + ["0.28.0"] * 8


def test_only_the_tests_of_the_source_distribution_are_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "vllm-1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("vllm-1/vllm/__init__.py", "vllm-1/tests/a/test_b.py", "vllm-1/setup.py"):
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"#"))
    conformance_env.unpack_tests(archive, tmp_path / "upstream")
    files = [str(path.relative_to(tmp_path / "upstream")) for path in (tmp_path / "upstream").rglob("*.py")]
    assert files == [os.path.join("tests", "a", "test_b.py")]


def test_every_version_is_one_that_the_plugin_supports() -> None:
    from fastattention_vllm.integration.compat import SUPPORTED_VLLM

    assert all(SUPPORTED_VLLM.contains(version) for version in conformance_env.TORCH)


@pytest.mark.parametrize("version", ["0.19.1", "0.23.0", "0.28.0", "0.32.0"])
def test_the_packages_of_each_version_are_pinned(version: str) -> None:
    assert set(conformance_env.TORCH) == {"0.19.1", "0.23.0", "0.28.0", "0.32.0"}
    pins = conformance_env.Environment(version).constraints.read_text().splitlines()
    assert any(line.startswith("transformers==") for line in pins)


def test_the_help_needs_only_python() -> None:
    """`make conformance` starts before anything is installed."""
    script = Path(conformance.__file__)
    run = subprocess.run([sys.executable, "-S", str(script), "--help"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "--versions" in run.stdout


def test_new_and_removed_options_are_named() -> None:
    was = {"engine": ["model", "old"], "sampling": ["n"]}
    now = {"engine": ["model", "new"], "sampling": ["n"], "pooling": ["task"]}
    assert vllm_surface.differences(was, now) == [
        "engine: new is new",
        "engine: old is gone",
        "pooling: task is new",
    ]


def test_the_installed_vllm_equals_its_record(tmp_path: Path) -> None:
    """The comparison that `make conformance` makes for every version."""
    (suite,) = (suite for suite in conformance.SUITES if suite.file.endswith("options_and_claims.py"))
    found = run_suite(suite, Path(sys.executable), tmp_path, tmp_path / "upstream", "installed")
    assert found.ok, found.problems
    assert found.passed == 7
