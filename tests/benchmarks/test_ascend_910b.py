"""The benchmark for owners of a 910B, run with the stand-in operator: it recognises right, wrong and failed results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ascend_910b
import ascend_910b_host
import pytest
import torch
from ascend_910b_steps import Step

from fastattention_vllm.attention import ascend
from fastattention_vllm.bench.hardware_report import HardwareReport
from fastattention_vllm.placement import host_attention
from tests.ascend import operator as ascend_operator
from tests.ascend.streams import stand_in


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    steps = [step for step in ascend_910b.right_steps() if step.name.startswith(("decode, head size 128", "chunked"))]
    monkeypatch.setattr(ascend_910b, "right_steps", lambda: steps[:6])
    monkeypatch.setattr(ascend_910b, "fast_steps", lambda: [Step("prefill", (40,), (40,), 4, 2)])
    monkeypatch.setattr(ascend_910b_host, "HOST_CACHE", 32 << 20)
    monkeypatch.setattr(ascend_910b, "host_layer", lambda device: ascend_910b_host.host_layer(device, 400))
    monkeypatch.setattr(host_attention, "MIN_STREAMED_BYTES", 1)
    stand_in(monkeypatch)
    return ascend_910b


def run(script: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, operator: Any) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(ascend, "operator", lambda: operator)
    out = folder / "out.json"
    monkeypatch.setattr(sys, "argv", ["x", "--json", str(out), "--device", "cpu", "--repeats", "1"])
    status = script.main()
    HardwareReport.model_validate_json(out.read_text())
    return status, json.loads(out.read_text())


def test_right_answers(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "triton_missing", lambda: "triton-ascend is not installed.")
    status, report = run(script, monkeypatch, tmp_path, ascend_operator.npu_fused_infer_attention_score)
    assert status == 0
    assert "The Triton kernels are left out: triton-ascend is not installed." in capsys.readouterr().out
    rows = report["rows"]
    assert [one["right"] for one in report["numbers"]] == [True] * 8
    speeds = {row["way"]: row for row in rows if "way" in row}
    assert speeds["ours"]["tflops"] > 0
    # The stand-in does not support full masks: that row reports it, and the others are unaffected.
    assert "whole mask" in speeds["whole mask"]["failed"]
    assert speeds["torch"]["ratio"] == speeds["torch"]["seconds"] / speeds["ours"]["seconds"]
    rates = next(row for row in rows if row["case"] == "host memory, 32 MiB")
    assert all(rates[name] > 0 for name in ("memory", "cpu", "link", "cpu_beside_link")), rates


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_the_triton_kernels_are_compared_too(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shift: float
) -> None:
    """The operator answers for them here. Steps that they refuse are left out."""

    def can_run(problem: Any) -> str | None:
        return "an int8 cache" if problem.key.dtype == torch.int8 else None

    def triton(problem: Any) -> Any:
        out, _ = ascend.run(problem)
        return out + shift, None

    monkeypatch.setattr(script, "triton_missing", lambda: None)
    monkeypatch.setattr(script.ascend_triton, "can_run", can_run)
    monkeypatch.setattr(script.ascend_triton, "run", triton)
    status, report = run(script, monkeypatch, tmp_path, ascend_operator.npu_fused_infer_attention_score)
    right = {one["case"]: one["right"] for one in report["numbers"] if one["case"].endswith(", Triton")}
    assert right
    assert not any("int8" in case for case in right)
    assert set(right.values()) == {shift == 0}
    assert status == int(shift != 0)


def test_an_additional_key_is_detected(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def off_by_one(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        wrong = given | ({"sparse_mode": 4, "next_tokens": 1} if given["sparse_mode"] == 3 else {})
        return ascend_operator.npu_fused_infer_attention_score(**wrong)

    status, report = run(script, monkeypatch, tmp_path, off_by_one)
    assert status == 1
    right = {one["case"]: one["right"] for one in report["numbers"]}
    assert any(right.values())
    assert not any(each for case, each in right.items() if case.startswith("host layer"))
