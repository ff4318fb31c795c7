"""`fastattention plan` as users start it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastattention_vllm import cli
from fastattention_vllm.plan.command import tokens_of
from fastattention_vllm.plan.errors import PlanError
from fastattention_vllm.plan.report import PlanReport
from tests.plan.shapes import FOLDER, folder

WITHOUT_TORCH = """
import sys
for name in ("torch", "vllm", "numpy", "transformers"):
    sys.modules[name] = None
from fastattention_vllm import cli
cli.main()
"""
PANGU = (folder("pangu-38b"), "--gpu", "v100-32g", "--tp", "8", "--context", "256K")


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, "plan", *arguments]
    return subprocess.run(command, cwd=FOLDER.parents[2], capture_output=True, text=True, timeout=60, check=False)


def test_it_needs_neither_torch_nor_vllm() -> None:
    result = plan(*PANGU, "--plot")
    assert result.returncode == 0, result.stderr
    assert "Layers by place" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("vllm serve ")


def test_as_json() -> None:
    result = plan(*PANGU, "--json")
    assert result.returncode == 0, result.stderr
    found = PlanReport.model_validate_json(result.stdout)
    assert len(found.auto.device_layers) + len(found.auto.host_layers) == 48
    assert found.asked.context == 1 << 18


def test_the_models_own_length_is_the_default() -> None:
    result = plan(folder("llama2-7b"), "--gpu", "v100-32g", "--json")
    assert json.loads(result.stdout)["asked"]["context"] == 4096


def test_the_options_reach_the_plan() -> None:
    result = plan(
        *(*PANGU, "--json", "--host", "epyc-pcie4", "--host-gib", "600", "--host-gb-per-s", "100", "--host-cores", "9"),
        *("--requests", "1", "--kv-dtype", "float16", "--batched-tokens", "4096", "--utilization", "0.85"),
        *("--weights-gib", "70", "--kv-cache-gib", "10", "--link-gb-per-s", "5", "--host-kv-gib", "50"),
    )
    found = PlanReport.model_validate_json(result.stdout)
    assert found.host.total == 600 << 30
    assert found.asked.batched_tokens == 4096
    assert found.device.weights == (70 << 30) // 8
    assert found.device.kv_needed <= 10 << 30
    assert found.host.limit == 8 * (50 << 30)
    assert "9 cores" not in found.hardware.host, "the table's entry is not rewritten"
    assert found.decode.limited_by == "host memory"
    assert "--gpu-memory-utilization 0.85" in found.serve_command


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("nowhere", "--gpu", "v100-32g"), 2, "nowhere is not a folder here"),
        (("meta-llama/Llama-2-7b", "--gpu", "v100-32g"), 2, "published names are not looked up"),
        ((str(FOLDER), "--gpu", "v100-32g"), 2, "contains no config.json"),
        ((folder("llama2-7b"), "--gpu", "gtx1080"), 2, "--gpu gtx1080 is not known; known names: v100-16g"),
        ((folder("llama2-7b"), "--gpu", "v100-32g", "--host", "x"), 2, "--host x is not known"),
        ((folder("llama2-7b"), "--gpu", "v100-32g", "--tp", "3"), 2, "--tp 3 does not divide"),
        ((folder("llama2-7b"), "--gpu", "v100-32g", "--context", "8K"), 2, "longer than the model's 4096 positions"),
        ((folder("llama2-7b"), "--gpu", "v100-32g", "--context", "8KB"), 2, "--context is '8KB'; write a number"),
        ((folder("llama2-7b"), "--gpu", "v100-32g", "--kv-dtype", "int4"), 2, "--kv-dtype int4 is not supported"),
        ((folder("llama2-7b"), "--gpu", "v100-32g", "--weights-gib", "inf"), 2, "--weights-gib is inf"),
        ((folder("llama2-70b"), "--gpu", "v100-32g"), 1, "the weights take 128.5 GiB per device"),
        ((folder("pangu-71b"), "--gpu", "v100-32g", "--tp", "8"), 1, "use --context 260864, a larger --tp"),
    ],
)
def test_errors_are_one_sentence(arguments: tuple[str, ...], status: int, said: str) -> None:
    result = plan(*arguments)
    assert result.returncode == status
    assert result.stdout == ""
    assert result.stderr.startswith("fastattention plan: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_weights_that_the_engine_refuses(tmp_path: Path) -> None:
    config = json.loads((FOLDER / "llama2-7b" / "config.json").read_text())
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": awq}))
    result = plan(str(tmp_path), "--gpu", "v100-32g", "--weights-gib", "4")
    assert result.returncode == 2
    assert result.stdout == ""
    assert "in the version 'gemv', which the engine refuses at start on NVIDIA V100 SXM2 32 GB: " in result.stderr
    assert result.stderr.count("\n") == 1
    assert plan(str(tmp_path), "--gpu", "t4-16g").returncode == 0


def test_an_option_without_a_value_is_typers_to_explain() -> None:
    result = plan(folder("llama2-7b"))
    assert result.returncode == 2
    assert "Missing option '--gpu'" in result.stderr


def test_help_lists_the_options() -> None:
    result = plan("--help")
    assert result.returncode == 0
    for option in ("--gpu", "--tp", "--context", "--requests", "--kv-dtype", "--host-gb-per-s", "--plot", "--json"):
        assert option in result.stdout


@pytest.mark.parametrize(("text", "tokens"), [("131072", 131072), ("256K", 1 << 18), ("1m", 1 << 20), (" 8k ", 8192)])
def test_lengths(text: str, tokens: int) -> None:
    assert tokens_of(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "0K", "-1", "1.5K", "K", "many", "1G"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(PlanError, match="write a number of tokens above 0"):
        tokens_of(text)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name != "rich" else object())
    monkeypatch.setattr(sys, "argv", ["fastattention", "plan", "here"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == "fastattention plan needs typer: pip install 'fastattention-vllm[plan]'"


def test_the_overview_names_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fastattention"])
    cli.main()
    assert "plan    Predict memory and speed" in capsys.readouterr().out


def test_data_files_are_beside_the_code() -> None:
    place = Path(cli.__file__).parent / "plan"
    assert {path.name for path in place.glob("*.json")} == {"hardware.json", "measured.json"}
