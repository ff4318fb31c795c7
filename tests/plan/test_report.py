"""The plan as data, as a picture, and as the command to paste."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import pytest
from rich.console import Console

from fastattention_vllm.plan import render
from fastattention_vllm.plan.hardware import GIB, machine
from fastattention_vllm.plan.memory import Request, plan_memory
from fastattention_vllm.plan.report import PlanReport, report
from tests.plan.shapes import folder, shape


def made(name: str = "pangu-38b", gpu: str = "v100-32g", ranks: int = 8, **asked: Any) -> PlanReport:
    model = shape(name)
    return report(
        plan_memory(model, machine(gpu, ranks), Request(**{"context": model.max_positions, **asked})), folder(name)
    )


def shown(found: PlanReport, plot: bool, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    render.show(console, found, plot)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_json_is_read_back() -> None:
    found = made()
    text = found.model_dump_json()
    assert PlanReport.model_validate_json(text) == found
    assert json.loads(text)["schema_version"] == 1
    assert "reconstruction" in json.loads(text)["paper"]["label"]


def test_the_schema_is_the_one_of_this_version() -> None:
    """A change of a field needs a higher ``schema_version``, and a change here."""
    schema = PlanReport.model_json_schema()
    fields = {"schema_version", "model", "hardware", "asked", "auto", "paper", "device", "host", "capacity"}
    assert set(schema["properties"]) == fields | {"prefill", "decode", "serve", "notes"}
    assert set(schema["$defs"]["DeviceBytes"]["properties"]) == {
        *("total", "weights", "driver", "activations", "workspace", "staging", "kv", "kv_needed", "free")
    }
    assert set(schema["$defs"]["Speed"]["properties"]) == {"seconds", "tokens_per_second", "limited_by", "parts"}


def test_bytes_add_up() -> None:
    found = made()
    device = found.device
    parts = (
        device.weights,
        device.driver,
        device.activations,
        device.workspace,
        device.staging,
        device.kv,
        device.free,
    )
    assert sum(parts) == device.total
    assert device.kv_needed <= device.kv
    assert found.host.kv_needed <= found.host.pool <= found.host.limit <= found.host.total
    assert found.model.kv_bytes_per_token == 48 * 2 * 64 * 128 * 2


def test_every_number_of_hardware_has_its_source() -> None:
    assert len(made().hardware.sources) == 4
    assert len(made("llama3-8b", "h200-141g", 1).hardware.sources) == 3, "one device has no links"
    assert made().hardware.state == "simulated; not yet run on hardware"


def test_the_command_has_what_was_decided() -> None:
    words = made(requests=1).serve
    assert words[:5] == ["vllm", "serve", folder("pangu-38b"), "--attention-backend", "fastattention"]
    option = json.loads(words[words.index("--additional-config") + 1])["fastattention"]
    assert set(option) == {"host_kv_gib"}
    found = made("llama3-8b", "v100-16g", 2, requests=2, kv_dtype="fp8", utilization=0.8, kv_cache_gib=2.0)
    text = found.serve_command
    assert "--dtype float16" in text, "a V100 has no bf16"
    assert "--kv-cache-dtype fp8" in text
    assert f"--kv-cache-memory-bytes {2 * GIB}" in text
    assert "--gpu-memory-utilization 0.8" in text
    assert """--additional-config '{"fastattention": {"host_kv_requests": 2}}'""" in text
    alone = made("llama3-8b", "h200-141g", 1).serve_command
    assert "--additional-config" not in alone
    assert "--tensor-parallel-size" not in alone
    assert "--dtype" not in alone


def test_the_command_never_asks_for_a_dtype_that_vllm_refuses() -> None:
    """Gemma-2 is published in float32, which vLLM serves in 16 bits, but not in float16."""
    model = dataclasses.replace(shape("llama3-8b"), architecture="Gemma2ForCausalLM", dtype="float32")
    found = report(plan_memory(model, machine("a100-80g", 1), Request(8192)), "here")
    assert "--dtype bfloat16" in found.serve_command
    assert found.asked.kv_dtype == "bfloat16"


def test_vllm_and_this_plugin_accept_the_command() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from fastattention_vllm.integration.options import KEY, Options

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    for found in (made(requests=1), made("llama3-8b", "v100-16g", 2, requests=2, kv_dtype="fp8", kv_cache_gib=3.0)):
        words = found.serve[3:]
        words[words.index("fastattention")] = "CPU_ATTN"  # the plugin adds its name at start
        parsed = parser.parse_args(words)
        assert parsed.max_model_len == found.asked.context
        assert parsed.tensor_parallel_size == found.hardware.devices
        Options.model_validate(parsed.additional_config[KEY])


def test_the_picture_shows_every_layer() -> None:
    found = made()
    lines = shown(found, plot=True).splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("Layers by place"))
    cells = "".join(line[5:].replace(" ", "") for line in lines[begin + 1 : begin + 3])
    assert [index for index, cell in enumerate(cells) if cell == render.DEVICE] == found.auto.device_layers
    assert [index for index, cell in enumerate(cells) if cell == render.HOST] == found.auto.host_layers
    (bar,) = [line for line in lines if line.lstrip().startswith("host ")]
    assert bar.count(render.HOST) == round(render.BAR * found.host.pool / found.host.total)
    assert "Layers by place" not in shown(found, plot=False)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_command_is_not_broken_into_lines(width: int) -> None:
    found = made()
    text = shown(found, plot=True, width=width)
    assert text.splitlines()[-1] == found.serve_command


def test_what_is_printed() -> None:
    text = shown(made(), plot=False)
    for part in (
        "16 layers",
        "32 layers",
        "our reconstruction of the paper's formula",
        "host memory",
        "FLOPs",
        "not yet run on hardware",
        "measure yours with `fastattention doctor`",
        "host_kv_gib is set to",
    ):
        assert part in text, part


def test_bars_never_grow_beyond_their_width() -> None:
    found = made("llama2-70b", "v100-32g", 8)
    full = found.model_copy(update={"device": found.device.model_copy(update={"total": found.device.total // 2})})
    assert shown(full, plot=True)


def test_the_way_to_decode_is_noted() -> None:
    asked = {"gpu": "h200-141g", "ranks": 1, "kv_cache_gib": 0.25, "context": 8192}
    notes = [made("llama3-8b", **asked, **more).notes for more in ({}, {"resident_kv_gib": 1.0})]
    for found, said in zip(notes, ("the device reads 11% of the host KV", "the CPU alone reads"), strict=True):
        assert any("one CUDA graph" in note and said in note for note in found), found
    assert any("runs in pieces" in note for note in made("pangu-38b", "ascend-910b-64g", 4).notes)


def test_layers_with_windows_are_noted() -> None:
    model = dataclasses.replace(shape("llama3-8b"), window=512, windowed_layers=tuple(range(0, 32, 2)))
    found = report(plan_memory(model, machine("h200-141g", 1), Request(8192)), "here")
    assert any("16 layers see 512 tokens" in note for note in found.notes)
