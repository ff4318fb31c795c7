"""Commands that the planner prints, for the start of the device that they are for: vLLM's parser, vLLM's configuration
with this package's checks, and the choice of this package's backend. The device's capability is faked, and of
FlashAttention the list of versions that its binaries have.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import vllm.config.model
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.selector import AttentionSelectorConfig

from fastattention_vllm.integration import compat, support
from fastattention_vllm.integration.cuda import select, start
from fastattention_vllm.integration.multimodal import TEXT_ONLY
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.plan import refused
from fastattention_vllm.plan.errors import PlanError
from fastattention_vllm.plan.hardware import Machine, machine
from fastattention_vllm.plan.memory import Request, plan_memory
from fastattention_vllm.plan.model import shape_of
from fastattention_vllm.plan.report import PlanReport, report
from tests.plan.shapes import FOLDER


def config_of(name: str, **entries: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / name / "config.json").read_text())
    return found | entries


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    },
    "kv_cache_scheme": SCHEME,
}
LLAMA = config_of("llama2-7b", model_type="llama")
MODELS: dict[str, dict[str, Any]] = {
    **{path.name: config_of(path.name) for path in sorted(FOLDER.iterdir())},
    "YaRN": config_of("qwen3-32b", rope_scaling=YARN),
    "YaRN beside images": config_of("mistral-small-3.1-24b")
    | {"text_config": config_of("mistral-small-3.1-24b")["text_config"] | {"rope_scaling": YARN}},
    "fp8 cache": config_of("qwen3-32b", quantization_config=FP8),
    "heads of 80": LLAMA | {"head_dim": 80},
    "heads of 160": LLAMA | {"head_dim": 160},
}
SERVED_BY_TEXT = "Mistral3ForConditionalGeneration"
"""vLLM's class needs torchvision, which the tests do not have. They start its language model."""
DEVICES = {
    "v100-32g": (7, 0),
    "t4-16g": (7, 5),
    "a100-80g": (8, 0),
    "l40s-48g": (8, 9),
    "h200-141g": (9, 0),
    "ascend-910b-64g": None,
}
"""With their compute capability."""
QUICK = ("v100-32g", "a100-80g")
"""The other devices are tested by `make test-more`."""
ASKED: dict[str, dict[str, Any]] = {
    "short": {"context": 2048, "batched_tokens": 4096, "utilization": 0.85},
    "requests": {"requests": 2, "context": 4096, "host_kv_gib": 3.5, "kv_cache_gib": 0.5},
    "many requests": {"requests": 300, "context": 16, "batched_tokens": 512},
    "fp8": {"kv_dtype": "fp8", "context": 2048},
    "e5m2": {"kv_dtype": "fp8_e5m2", "context": 2048},
    "fp16": {"kv_dtype": "float16", "context": 2048},
    "bf16": {"kv_dtype": "bfloat16", "context": 2048},
    "int8 host layers": {"host_kv_dtype": "int8", "kv_cache_gib": 0.5, "context": 8192},
    "copies": {"resident_kv_gib": 0.25, "kv_cache_gib": 0.5, "context": 8192},
}


def planned(config: dict[str, Any], computer: Machine, folder: str, asked: dict[str, Any]) -> PlanReport:
    """As `fastattention plan` does it, with the longest context that the device has room for."""
    shape = shape_of(config, folder)
    refused.check(shape, computer)
    request = Request(**{"context": shape.max_positions, **asked})
    return report(plan_memory(shape, computer, request), folder)


def smallest(name: str, device: str, asked: dict[str, Any], folder: str = "here") -> PlanReport | str:
    """The plan on as few devices as it needs, or the planner's last sentence."""
    said = ""
    for ranks in (1, 2, 4, 8):
        try:
            return planned(MODELS[name], machine(device, ranks), folder, asked)
        except PlanError as error:
            said = str(error)
            assert said.endswith("."), said
            assert "\n" not in said
    return said


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    """That of `vllm serve`."""
    compat.ensure_backend_member()
    return make_arg_parser(FlexibleArgumentParser())


def parsed(found: PlanReport, parser: FlexibleArgumentParser) -> Any:
    assert found.serve[:2] == ["vllm", "serve"]
    words = parser.parse_args(shlex.split(found.serve_command)[2:])
    words.model = words.model_tag  # as vLLM's own command does
    return words


@pytest.fixture(params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.more) for name in DEVICES])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The platform says what vLLM's platform of this device says; what it would do for a CPU is left out."""
    name: str = request.param
    capability, kind = DEVICES[name], type(current_platform)
    found = capability and DeviceCapability(*capability)
    dtypes = (
        [torch.float16, torch.float32]
        if capability and capability < (8, 0)
        else [torch.bfloat16, torch.float16, torch.float32]
    )
    monkeypatch.setattr(kind, "get_device_capability", lambda device_id=0: found)
    monkeypatch.setattr(kind, "supported_dtypes", property(lambda self: dtypes))
    monkeypatch.setattr(kind, "check_and_update_config", staticmethod(lambda config: None))
    # What install() replaces is put back after the test.
    monkeypatch.setattr(vllm.config.model, "_check_valid_dtype", vllm.config.model._check_valid_dtype)
    monkeypatch.setattr(kind, "apply_config_platform_defaults", kind.apply_config_platform_defaults)
    start.install()
    binaries = ModuleType("vllm.vllm_flash_attn.flash_attn_interface")
    versions = {8: (2,), 9: (2, 3, 4)}.get(capability[0] if capability else 0, ())
    vars(binaries).update(
        is_fa_version_supported=lambda version: version in versions,
        fa_version_unsupported_reason=lambda version: "it is not in these binaries",
    )
    monkeypatch.setitem(sys.modules, binaries.__name__, binaries)
    return name


def started(found: PlanReport, config: dict[str, Any], folder: Path, parser: FlexibleArgumentParser) -> Any:
    """vLLM's configuration after this package's checks for the device."""
    arguments = AsyncEngineArgs.from_cli_args(parsed(found, parser))
    if config["architectures"] == [SERVED_BY_TEXT]:
        config = {
            "torch_dtype": config["torch_dtype"],
            **config["text_config"],
            "architectures": ["MistralForCausalLM"],
        }
        arguments.hf_overrides = arguments.hf_overrides.get("text_config", {})
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != "source"}))
    arguments.skip_tokenizer_init = True
    made = arguments.create_engine_config()
    options_of(made)
    capability = current_platform.get_device_capability()
    if capability is None:
        support.check_supported(made, support.UNTESTED_ON_NPUS)
        return made
    support.check_kv_cache(made)
    cache = made.cache_config.cache_dtype
    if cache == "auto" and "quantization_config" in config:
        cache = "fp8"  # as vLLM's layers do for this checkpoint
    with set_current_vllm_config(made):
        backend = select.chosen()
        asked = AttentionSelectorConfig(
            head_size=made.model_config.get_head_size(),
            dtype=made.model_config.dtype,
            kv_cache_dtype=cache,
            block_size=None,
            use_mm_prefix=made.model_config.is_mm_prefix_lm,
            has_sliding_window=bool(made.model_config.get_sliding_window()),
        )
        assert backend.validate_configuration(device_capability=capability, **asked._asdict()) == []
    return made


def check(found: PlanReport, made: Any) -> None:
    """vLLM's configuration is what was planned."""
    assert made.model_config.max_model_len == found.asked.context
    dtype = str(made.model_config.dtype).removeprefix("torch.")
    assert found.asked.kv_dtype in (dtype, *support.FP8_CACHES)
    assert made.parallel_config.tensor_parallel_size == found.hardware.devices
    assert made.scheduler_config.max_num_batched_tokens == found.asked.batched_tokens
    assert made.scheduler_config.max_num_seqs >= found.asked.requests
    assert not made.model_config.is_mm_prefix_lm
    options = options_of(made)
    assert options.host_kv_dtype == found.asked.host_kv_dtype
    assert options.host_kv_requests == found.asked.requests


@pytest.mark.parametrize("name", MODELS)
def test_a_printed_command_starts(name: str, device: str, parser: FlexibleArgumentParser, tmp_path: Path) -> None:
    found = smallest(name, device, {}, str(tmp_path))
    refuses = isinstance(found, str)
    assert refuses == ((name, device) in REFUSED or (name.startswith("gemma") and device in ("v100-32g", "t4-16g"))), (
        found
    )
    if isinstance(found, PlanReport):
        check(found, started(found, MODELS[name], tmp_path, parser))


REFUSED = {
    ("heads of 160", "v100-32g"),
    ("heads of 160", "t4-16g"),
    ("llama2-70b", "t4-16g"),
    ("pangu-71b", "t4-16g"),
    ("pangu-71b", "v100-32g"),
    ("gemma2-9b", "ascend-910b-64g"),
    ("gemma3-4b", "ascend-910b-64g"),
    ("gemma3-27b", "ascend-910b-64g"),
    *(("fp8 cache", name) for name in ("a100-80g", "l40s-48g", "ascend-910b-64g")),
}
"""Models that the planner refuses, or that do not fit. All others start."""


@pytest.mark.parametrize("what", ASKED)
@pytest.mark.parametrize("name", ["llama3-8b", pytest.param("qwen3.5-27b", marks=pytest.mark.more)])
def test_a_command_with_options_starts(
    name: str, what: str, device: str, parser: FlexibleArgumentParser, tmp_path: Path
) -> None:
    found = smallest(name, device, ASKED[what], str(tmp_path))
    assert isinstance(found, str) == ((what, device) in WITHOUT or (name, what, device) in WITHOUT), found
    if isinstance(found, PlanReport):
        made = started(found, MODELS[name], tmp_path, parser)
        check(found, made)
        assert made.cache_config.cache_dtype == ASKED[what].get("kv_dtype", "auto")
        assert made.cache_config.gpu_memory_utilization == ASKED[what].get("utilization", 0.9)
        assert (made.cache_config.kv_cache_memory_bytes is None) == ("kv_cache_gib" not in ASKED[what])


FLASH = ("a100-80g", "l40s-48g", "h200-141g")
WITHOUT: set[tuple[str, ...]] = {
    *(("fp8", name) for name in ("a100-80g", "l40s-48g", "ascend-910b-64g")),
    *(("e5m2", name) for name in (*FLASH, "ascend-910b-64g")),
    *(("fp16", name) for name in (*FLASH, "ascend-910b-64g")),
    *(("bf16", name) for name in ("v100-32g", "t4-16g")),
    ("int8 host layers", "ascend-910b-64g"),
    ("qwen3.5-27b", "many requests", "t4-16g"),
}
"""Options that the planner refuses on a device. Copies are refused on NPUs as well, but two need none here."""


def test_the_option_for_text_alone_is_the_engines() -> None:
    words = smallest("gemma3-4b", "a100-80g", {})
    assert isinstance(words, PlanReport)
    assert TEXT_ONLY in words.serve_command


def test_the_planner_knows_the_capabilities() -> None:
    assert {name: machine(name, 1).device.capability for name in DEVICES} == DEVICES
