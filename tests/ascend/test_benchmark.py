"""The command for a 910B's owner, with the stand-in operator: what it calls right, wrong and failed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastattention_vllm.attention import ascend
from fastattention_vllm.placement import host_attention
from tests.ascend import operator as ascend_operator
from tests.ascend.streams import stand_in

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "ascend_910b.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("ascend_910b", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ascend_910b", module)
    spec.loader.exec_module(module)
    cases = [case for case in module.right_cases() if case.name.startswith(("decode, head size 128", "chunked"))]
    monkeypatch.setattr(module, "right_cases", lambda: cases[:6])
    monkeypatch.setattr(module, "fast_cases", lambda: [module.Case("prefill", (40,), (40,), 4, 2)])
    monkeypatch.setattr(module, "HOST_CACHE", 32 << 20)
    host_layer = module.host_layer
    monkeypatch.setattr(module, "host_layer", lambda device: host_layer(device, 400))
    monkeypatch.setattr(host_attention, "MIN_STREAMED_BYTES", 1)
    stand_in(monkeypatch)
    return module


def run(script: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, operator: Any) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(ascend, "operator", lambda: operator)
    out = folder / "out.json"
    monkeypatch.setattr(sys, "argv", ["x", "--json", str(out), "--device", "cpu", "--repeats", "1"])
    return script.main(), json.loads(out.read_text())


def test_right_answers(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, report = run(script, monkeypatch, tmp_path, ascend_operator.npu_fused_infer_attention_score)
    assert status == 0
    rows = report["rows"]
    assert [row["right"] for row in rows if row["metric"] == "error"] == [True] * 8
    speeds = {row["way"]: row for row in rows if "way" in row}
    assert speeds["ours"]["tflops"] > 0
    # The stand-in has no whole masks: that row says so and costs the others nothing.
    assert "whole mask" in speeds["whole mask"]["failed"]
    assert speeds["torch"]["seconds"] > 0
    rates = next(row for row in rows if row["case"] == "host memory, 32 MiB")
    assert all(rates[name] > 0 for name in ("memory", "cpu", "link", "cpu_beside_link")), rates


def test_a_key_too_many_is_noticed(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def off_by_one(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        wrong = given | ({"sparse_mode": 4, "next_tokens": 1} if given["sparse_mode"] == 3 else {})
        return ascend_operator.npu_fused_infer_attention_score(**wrong)

    status, report = run(script, monkeypatch, tmp_path, off_by_one)
    assert status == 1
    right = {row["case"]: row["right"] for row in report["rows"] if row["metric"] == "error"}
    assert any(right.values())
    assert not any(each for case, each in right.items() if case.startswith("host layer"))
