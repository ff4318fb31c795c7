"""Starts on GPUs of compute capability 7.x, which are faked: vLLM's own configuration of models, and no GPU."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.config.model
from transformers import AutoConfig
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from fastattention_vllm.attention import xformers
from fastattention_vllm.integration import compat, plugin
from fastattention_vllm.integration.cuda import start
from fastattention_vllm.integration.refusal import Refusal, sentence
from fastattention_vllm.integration.serving import ray_cluster
from tests import reference_models as reference

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}
SERVE = r"serve a model that runs in float16 \(Llama, Qwen2.5, Qwen3, Mistral\)"
FLOAT32 = r", or install xformers and pass --dtype float32 and --additional-config .*xformers.*twice the memory\."


@pytest.fixture(params=[(7, 0), (7, 5)], ids=["V100", "T4"])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The platform says what vLLM's CUDA platform says on these GPUs: their capability, and no bfloat16."""
    kind = type(current_platform)
    monkeypatch.setattr(kind, "get_device_capability", lambda device_id=0: DeviceCapability(*request.param))
    monkeypatch.setattr(kind, "supported_dtypes", property(lambda self: [torch.float16, torch.float32]))
    # What install() replaces is put back after the test.
    monkeypatch.setattr(vllm.config.model, "_check_valid_dtype", vllm.config.model._check_valid_dtype)
    monkeypatch.setattr(kind, "apply_config_platform_defaults", kind.apply_config_platform_defaults)
    start.install()
    return (request.param[0], request.param[1])


def arguments(folder: Path, **named: Any) -> EngineArgs:
    """Of a small Gemma-3."""
    AutoConfig.for_model("gemma3_text", **SHAPE, architectures=["Gemma3ForCausalLM"]).save_pretrained(folder)
    return EngineArgs(model=str(folder), skip_tokenizer_init=True, attention_backend="fastattention", **named)


def test_float16_is_refused_with_what_to_serve(capability: tuple[int, int], tmp_path: Path) -> None:
    with pytest.raises(Exception, match="does not run in float16") as stop:
        arguments(tmp_path, dtype="float16").create_model_config()
    shown = sentence(stop.value)
    assert shown is not None
    assert shown.startswith("fastattention: model type 'gemma3_text' does not run in float16, because it is numeric")
    assert f"this GPU (compute capability {capability[0]}.{capability[1]}) has no bfloat16" in shown
    assert re.search(SERVE + FLOAT32, shown), shown


@pytest.mark.usefixtures("capability")
def test_every_model_type_that_vllm_refuses_is_refused_so() -> None:
    refused = vllm.config.model._FLOAT16_NOT_SUPPORTED_MODELS
    assert {"gemma2", "gemma3", "gemma3_text", "glm4"} <= set(refused)
    for model_type in refused:
        with pytest.raises(Refusal, match=f"{SERVE}{FLOAT32 if model_type != 'gemma2' else '[.]$'}"):
            vllm.config.model._check_valid_dtype(model_type, torch.float16)
        assert vllm.config.model._check_valid_dtype(model_type, torch.float32)
    assert vllm.config.model._check_valid_dtype("qwen3", torch.float16)


@pytest.mark.usefixtures("capability")
def test_float32_which_vllm_chooses_instead_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="Volta kernels need float16") as stop:
        arguments(tmp_path, dtype="auto").create_engine_config()
    shown = sentence(stop.value)
    assert shown is not None
    assert shown.startswith(
        "fastattention: the model's dtype is float32, but the Volta kernels need float16, and model"
    )
    assert "pass --dtype float16" not in shown
    assert re.search(SERVE + FLOAT32, shown), shown


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("gemma2", f"model type 'gemma2' does not run in float16, .*; {SERVE}\\.$"),
        ("glm4", f"model type 'glm4' does not run in float16, .*; {SERVE}{FLOAT32}$"),
        ("llama", "need float16; pass --dtype float16, or install xformers"),
    ],
)
def test_the_way_out_of_float32_fits_the_model(model_type: str, text: str) -> None:
    with pytest.raises(Refusal, match=text):
        type(current_platform).apply_config_platform_defaults(stub(torch.float32, model_type=model_type))


@pytest.mark.usefixtures("capability")
def test_float32_with_xformers_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xformers, "version", lambda: "0.0.34")
    config = stub(dtype=torch.float32, volta_fallback="xformers")
    type(current_platform).apply_config_platform_defaults(config)
    assert config.compilation_config.mode is None  # xformers has no graphs of whole steps


# --- defaults --------------------------------------------------------------------------------------------------------


def stub(
    dtype: torch.dtype = torch.float16,
    backend: Any = "ours",
    level: int = 2,
    model_type: str = "llama",
    experts: int = 0,
    **options: Any,
) -> Any:
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format="auto"),
        model_config=SimpleNamespace(
            model="a/model",
            dtype=dtype,
            max_model_len=1024,
            get_head_size=lambda: 128,
            get_num_experts=lambda: experts,
            use_mla=False,
            is_hybrid=False,
            is_attention_free=False,
            enforce_eager=False,
            is_moe=experts > 0,
            quantization=None,
            hf_config=SimpleNamespace(model_type=model_type),
            hf_text_config=SimpleNamespace(model_type=model_type),
        ),
        attention_config=SimpleNamespace(backend=compat.ensure_backend_member() if backend == "ours" else backend),
        compilation_config=CompilationConfig(),
        optimization_level=level,
        additional_config={"fastattention": options},
        kv_transfer_config=None,
        cache_config=SimpleNamespace(kv_offloading_size=None, kv_sharing_fast_prefill=False, cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, enable_dbo=False
        ),
    )


def test_the_v100_alone_runs_without_torch_compile_and_with_graphs(capability: tuple[int, int]) -> None:
    config = stub()
    assert (config.compilation_config.mode, config.compilation_config.cudagraph_mode) == (None, None)
    type(current_platform).apply_config_platform_defaults(config)
    found = (config.compilation_config.mode, config.compilation_config.cudagraph_mode)
    changed = (CompilationMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY)
    assert found == (changed if capability == (7, 0) else (None, None))


@pytest.mark.usefixtures("capability")
def test_a_model_that_does_not_run_is_not_to_be_downloaded_again(tmp_path: Path) -> None:
    config = stub(torch.float32)
    config.model_config.model = str(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(Refusal, match="need float16"):
        type(current_platform).apply_config_platform_defaults(config)
    config.model_config.dtype = torch.float16
    with pytest.raises(Refusal, match="download or copy the model again"):
        type(current_platform).apply_config_platform_defaults(config)


@pytest.mark.usefixtures("capability")
def test_a_checkpoint_with_a_scale_per_head_of_its_cache_is_refused() -> None:
    config = stub()
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head", "symmetric": True}
    config.model_config.hf_config.quantization_config = {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": scheme,
    }
    config.cache_config.kv_cache_dtype_skip_layers = []
    with pytest.raises(
        Refusal, match=r"^a KV cache with one scale per head \(kv_cache_scheme: attn_head\) is not supp"
    ):
        type(current_platform).apply_config_platform_defaults(config)


@pytest.mark.usefixtures("capability")
def test_features_that_were_never_run_are_refused() -> None:
    """tests/integration/test_support.py has all of them."""
    config = stub()
    config.cache_config.kv_sharing_fast_prefill = True
    with pytest.raises(Refusal, match="--kv-sharing-fast-prefill"):
        type(current_platform).apply_config_platform_defaults(config)


def asked(**values: Any) -> Any:
    config = stub()
    config.compilation_config = CompilationConfig(**values)
    return config


@pytest.mark.parametrize(
    "config",
    [
        asked(mode=CompilationMode.VLLM_COMPILE),
        asked(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        stub(level=0),
        stub(backend=None),
    ],
    ids=["mode", "graphs", "-O0", "another backend"],
)
@pytest.mark.usefixtures("capability")
def test_what_the_user_has_set_stays(config: Any) -> None:
    before = (config.compilation_config.mode, config.compilation_config.cudagraph_mode)
    type(current_platform).apply_config_platform_defaults(config)
    assert (config.compilation_config.mode, config.compilation_config.cudagraph_mode) == before


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The platform, which says that it is an H100."""
    kind = type(current_platform)
    monkeypatch.setattr(kind, "get_device_capability", lambda device_id=0: DeviceCapability(9, 0))
    monkeypatch.setattr(kind, "apply_config_platform_defaults", kind.apply_config_platform_defaults)
    start.install()
    return kind


def padding_of(config: Any) -> bool | None:
    found: bool | None = config.compilation_config.inductor_compile_config.get("shape_padding")
    return found


@pytest.mark.parametrize(
    ("experts", "padding"), [(0, None), (1, None), (4, False), (60, False), (64, None), (128, None)]
)
def test_rows_of_router_logits_are_not_padded(experts: int, padding: bool | None, hopper: Any) -> None:
    config, of_others = stub(experts=experts), stub(experts=experts, backend=None)
    hopper.apply_config_platform_defaults(config)
    hopper.apply_config_platform_defaults(of_others)
    assert padding_of(config) is padding
    assert padding_of(of_others) is None
    assert "shape_padding" in torch._inductor.config._config, "inductor has renamed its option"


@pytest.mark.usefixtures("hopper")
def test_the_experts_of_a_checkpoint_are_found(tmp_path: Path) -> None:
    """vLLM's own configuration, from the arguments to what torch.compile gets."""
    reference.gpt_oss().save_pretrained(tmp_path)
    asked = EngineArgs(
        model=str(tmp_path), skip_tokenizer_init=True, attention_backend="fastattention", max_model_len=64
    )
    assert padding_of(asked.create_engine_config()) is False


@pytest.mark.parametrize("mode", [None, CompilationMode.VLLM_COMPILE])
def test_padding_is_turned_off_only_if_there_is_any(capability: tuple[int, int], mode: Any) -> None:
    """By default the V100 compiles nothing."""
    config = stub(experts=4)
    config.compilation_config.mode = mode
    type(current_platform).apply_config_platform_defaults(config)
    assert padding_of(config) is (None if capability == (7, 0) and mode is None else False)


def test_padding_that_the_user_has_asked_for_stays(hopper: Any) -> None:
    config = stub(experts=4)
    config.compilation_config = CompilationConfig(inductor_compile_config={"shape_padding": True})
    hopper.apply_config_platform_defaults(config)
    assert padding_of(config) is True


# --- where -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [None, (6, 1)])
def test_nothing_changes_on_other_gpus(found: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(current_platform)
    answer = None if found is None else DeviceCapability(*found)
    monkeypatch.setattr(kind, "get_device_capability", lambda device_id=0: answer)
    before = (vllm.config.model._check_valid_dtype, kind.apply_config_platform_defaults)
    start.install()
    assert (vllm.config.model._check_valid_dtype, kind.apply_config_platform_defaults) == before


@pytest.mark.parametrize("found", [(8, 0), (9, 0)])
def test_newer_gpus_refuse_only_models_that_no_kernel_computes(
    found: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(current_platform)
    monkeypatch.setattr(kind, "get_device_capability", lambda device_id=0: DeviceCapability(*found))
    monkeypatch.setattr(kind, "apply_config_platform_defaults", kind.apply_config_platform_defaults)
    check = vllm.config.model._check_valid_dtype
    start.install()
    assert vllm.config.model._check_valid_dtype is check
    plain = stub(dtype=torch.bfloat16)
    plain.cache_config.kv_sharing_fast_prefill = True
    kind.apply_config_platform_defaults(plain)
    assert plain.compilation_config.mode is None
    latent = stub()
    latent.model_config.use_mla = True
    with pytest.raises(Refusal, match=r"^multi-head latent attention \(llama\) is not supported"):
        kind.apply_config_platform_defaults(latent)
    latent.attention_config.backend = None
    kind.apply_config_platform_defaults(latent)


@pytest.mark.parametrize(("platform", "times"), [("cuda", 2), ("cpu", 0)])
def test_the_plugin_installs_both_on_nvidia_gpus(platform: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(compat, "backend_path", lambda: compat.BACKENDS.get(platform, compat.BACKEND_PATH))
    for module in (start, ray_cluster):
        monkeypatch.setattr(module, "install", lambda: calls.append(True))
    plugin.register()
    assert len(calls) == times


def test_installing_twice_is_installing_once(capability: tuple[int, int]) -> None:
    kind = type(current_platform)
    before = (vllm.config.model._check_valid_dtype, kind.apply_config_platform_defaults)
    start.install()
    assert (vllm.config.model._check_valid_dtype, kind.apply_config_platform_defaults) == before
