"""Hardware reports, as `fastattention bench volta --report` and benchmarks/ascend_910b.py write them; no hardware."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from typer.testing import CliRunner

from fastattention_vllm.attention.volta import kernels
from fastattention_vllm.attention.volta.launch import HEAD_SIZES
from fastattention_vllm.bench import command, volta, volta_numbers
from fastattention_vllm.bench import gpu as gpus
from fastattention_vllm.bench.hardware_report import Check, HardwareReport, reference
from fastattention_vllm.bench.volta_numbers import Step
from tests.attention import oracle
from tests.attention.volta import simulated_gpu
from tests.bench.test_volta import WallClock

CPU = torch.device("cpu")
KINDS = [step for step in volta_numbers.steps((64,)) if step.shape == "decode"]


def test_every_head_size_mask_and_cache_is_checked() -> None:
    every = list(volta_numbers.steps())
    assert len({str(step) for step in every}) == len(every) == len(HEAD_SIZES) * len(volta_numbers.SHAPES) * 7
    assert {step.cache for step in every} == {torch.float16, torch.float8_e5m2, torch.float8_e4m3fn}


@pytest.mark.parametrize("step", [step for step in volta_numbers.steps((80,)) if step.shape == "mixed"], ids=str)
def test_the_reference_is_the_oracle(step: Step) -> None:
    problem = step.build(CPU)
    torch.testing.assert_close(reference(problem), oracle.attention(problem)[0], rtol=1e-9, atol=1e-9)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated_gpu.use(monkeypatch)
    monkeypatch.setattr(kernels, "DEVICE", "cpu")


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("step", KINDS, ids=str)
def test_the_kernels_are_right_on_the_simulated_v100(step: Step) -> None:
    found = volta_numbers.check(step, CPU)
    assert found.right, found
    assert found.error is not None
    assert 0 < found.error <= volta.TOLERANCE


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (lambda problem: oracle.attention(problem)[0] + 0.02, ""),
        (lambda problem: torch.full_like(problem.query, math.nan), "the answer contains NaN."),
        (lambda problem: 1 // 0, None),
    ],
    ids=["off", "NaN", "a bug of the check itself"],
)
def test_wrong_answers_are_wrong(changed: Any, text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "run", lambda problem: (changed(problem), None))
    if text is None:
        with pytest.raises(ZeroDivisionError):
            volta_numbers.check(KINDS[0], CPU)
        return
    found = volta_numbers.check(KINDS[0], CPU)
    assert (found.right, found.note) == (False, text)


def test_a_step_that_fails_is_wrong_and_keeps_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(problem: Any) -> Any:
        raise RuntimeError("CUDA error 700:\n  an illegal memory access")

    monkeypatch.setattr(kernels, "run", fail)
    assert volta_numbers.check(KINDS[0], CPU) == Check(
        case=str(KINDS[0]),
        error=None,
        allowed=volta.TOLERANCE,
        right=False,
        note="RuntimeError: CUDA error 700: an illegal memory access",
    )


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("right", [True, False])
def test_from_the_command_line_to_the_report(right: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Numbers come first, and one that is wrong is the exit status."""
    order: list[str] = []
    measure, check = volta.measure, volta_numbers.check
    monkeypatch.setattr(volta, "why_not", lambda kernels: None)
    monkeypatch.setattr(gpus, "CudaGpu", lambda: WallClock())
    monkeypatch.setattr(gpus, "hardware", lambda: {"gpu": "Tesla V100-SXM2-16GB", "driver_version": "580.82.07"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"L2_cache_size": 1})
    )
    monkeypatch.setattr(volta_numbers, "steps", lambda: KINDS[:2])

    def checked(step: Step, device: torch.device) -> Check:
        order.append("numbers")
        return check(step, CPU).model_copy(update={"right": right})

    def measured(*given: Any) -> Any:
        order.append("speed")
        return measure(*given)

    monkeypatch.setattr(volta_numbers, "check", checked)
    monkeypatch.setattr(volta, "measure", measured)
    out = tmp_path / "v100.json"
    arguments = ["--tokens", "16", "--context", "", "--batch", "1", "--heads", "1", "--rounds", "1"]
    result = CliRunner().invoke(
        command.app, ["bench", "volta", *arguments, "--contender", "eager", "--report", str(out)]
    )
    assert result.exit_code == (0 if right else 1), result.output
    assert order == ["numbers", "numbers", "speed", "speed"]
    assert f"{2 if right else 0} of 2 kinds of step are right" in result.output
    assert "Please attach it to an issue" in result.output
    found = HardwareReport.model_validate_json(out.read_text())
    assert found.device == "Tesla V100-SXM2-16GB"
    assert [one.right for one in found.numbers] == [right] * 2
    assert {"ours", "TFLOPS"} <= {*json.loads(out.read_text())["rows"][0], found.rows[0].unit}
    assert json.loads(out.read_text())["rows"][0]["contender"]  # fields of this benchmark alone are kept


def test_what_is_no_hardware_report_is_refused() -> None:
    right = {
        "device": "Tesla T4",
        "hardware": {},
        "versions": {},
        "date": "2026-11-25",
        "numbers": [],
        "rows": [],
    }
    HardwareReport.model_validate(right)
    for wrong in (right | {"format": 2}, right | {"more": 1}, {key: right[key] for key in right if key != "numbers"}):
        with pytest.raises(ValidationError):
            HardwareReport.model_validate(wrong)
