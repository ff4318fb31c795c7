from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastattention_vllm import cli
from fastattention_vllm.bench.cpu_report import CpuReport

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "cpu_attention.py"


def bench(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)


def test_from_the_command_line_to_the_plots(tmp_path: Path) -> None:
    out, plots = tmp_path / "result.json", tmp_path / "plots"
    result = bench(
        *("--case", "decode fp16 (4,2,64) 100 b2", "--case", "decode fp16 (4,2,64) 200 b2"),
        *("--threads", "1", "--rounds", "1", "--sweep-gib", "0.01", "--contender", "ours", "--contender", "sdpa"),
        *("--json", str(out), "--plot", str(plots)),
    )
    assert result.returncode == 0, result.stderr
    report = CpuReport.model_validate_json(out.read_text())
    assert [row.case for row in report.rows] == ["decode fp16 (4,2,64) 100 b2", "decode fp16 (4,2,64) 200 b2"]
    for row in report.rows:
        assert row.threads == 1
        assert row.ours is not None
        assert row.peer_name == "torch SDPA"
        assert row.longer in ("read", "flops")
        assert any("as asked" in note for note in row.notes)
    names = {path.name for path in plots.glob("*.png")}
    assert names == {"decode-roofline-by-context.png", "decode-speed-by-context.png"}
    assert "of the roofline" in result.stdout
    # On a busy machine, where this also runs, there may be no undisturbed row for a mean.
    assert "geometric mean" in result.stdout or not any(row.reliable for row in report.rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--case", "decode"], "case 'decode' is not understood"),
        (["--suite", "all"], "there is no suite 'all'"),
        (["--threads", "two"], "--threads is 'two'"),
        (["--threads", "100000"], "--threads names 100000"),
        (["--contender", "x"], "there is no contender 'x'"),
        (["--json", "/nowhere/at/all.json"], "/nowhere/at/all.json"),
        (["--json", "/"], "/: Is a directory."),
    ],
)
def test_errors_are_one_sentence(arguments: list[str], said: str) -> None:
    result = bench(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("fastattention bench: ")
    assert said in line


@pytest.mark.parametrize(
    ("cases", "contender", "status"),
    [
        (["decode fp16 (4,2,300) 100 b1"], "ours", 1),
        (["decode fp16 (4,2,300) 100 b1"], "sdpa", 0),
        (["decode fp16 (4,2,300) 100 b1", "decode fp16 (4,2,64) 100 b1"], "ours", 0),
    ],
)
def test_the_exit_status_reports_that_no_case_could_run(cases: list[str], contender: str, status: int) -> None:
    spelled = [argument for case in cases for argument in ("--case", case)]
    result = bench(*spelled, "--contender", contender, "--threads", "1", "--rounds", "1", "--sweep-gib", "0.01")
    assert result.returncode == status, result.stderr
    assert ("head_size is 300, but the CPU kernels support multiples of 8 up to 256." in result.stdout) == (
        contender == "ours"
    )


def test_no_library() -> None:
    result = bench(environment={"FASTATTENTION_CPU_LIBRARY": "/nowhere.so"})
    problem = "FASTATTENTION_CPU_LIBRARY is /nowhere.so, but there is no such file; unset it or fix it."
    assert result.stderr == f"fastattention bench: {problem}\n"


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name != "rich" else object())
    monkeypatch.setattr(sys, "argv", ["fastattention", "bench", "cpu"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == "fastattention bench needs typer: pip install 'fastattention-vllm[bench]'"


WITHOUT_MATPLOTLIB = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "matplotlib" else found(name, *rest)
from fastattention_vllm import cli
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["doctor", "--help"], 0, ""),
        (
            ["bench", "cpu", "--plot", "plots"],
            2,
            "fastattention bench: --plot needs matplotlib: pip install 'fastattention-vllm[bench]'\n",
        ),
    ],
)
def test_only_plots_need_matplotlib(arguments: list[str], status: int, said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_MATPLOTLIB, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, said)
    assert not list(tmp_path.iterdir())
