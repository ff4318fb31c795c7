"""benchmarks/volta_launch_cost.py without a GPU: its refusals, the result of its layer, and what it counts."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.attention.volta import simulated_gpu
from tests.attention.volta.conftest import described_kernels  # noqa: F401  an autouse fixture

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("volta_launch_cost")


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        ("ptx", "there is no NVIDIA GPU that torch can use"),
        ("sm_75", "--kernels is 'sm_75'; there are auto, ptx, ptx-sm_75."),
    ],
)
def test_impossible_measurements_are_refused_in_one_sentence(kernels: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, str(FOLDER / "volta_launch_cost.py"), "--kernels", kernels, "--json", str(file)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"volta_launch_cost: {said}")
    assert not file.exists()


def test_a_layer_is_three_launches(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grids = simulated_gpu.use(monkeypatch)
    launch, out = script.decoding_layer(2, 40, torch.device("cpu"))
    out.fill_(float("nan"))
    launch()
    assert [name for name, _ in grids] == ["fa_volta_write_kv", "fa_volta_decode", "fa_volta_combine"]
    assert out.isfinite().all()


def test_waiting_is_not_counted_and_a_slow_call_is_not_the_median(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0, 0

    def call() -> None:
        nonlocal now, calls
        calls += 1
        now += 9_000 if calls > script.AT_A_TIME and calls % 10 else 900_000

    def wait() -> None:
        nonlocal now
        now += 10**9

    monkeypatch.setattr(time, "perf_counter_ns", lambda: now)
    assert script.microseconds(call, 3, wait) == 9.0
    assert calls == 4 * script.AT_A_TIME
    found = script.row(32, 40.0, 8.0)
    assert (found.ours, found.peer, found.ratio) == (40.0, 8.0, 0.2)
