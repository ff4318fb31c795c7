"""Which quantised checkpoints this package takes from vLLM, and on which GPUs. The capability is faked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import quantization
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.cuda.quantised import config as common
from fastattention_vllm.integration.cuda.quantised import registration
from fastattention_vllm.integration.cuda.quantised.registration import QuantisedCheckpoint
from fastattention_vllm.integration.cuda.quantised.scope import NAME
from fastattention_vllm.integration.refusal import Refusal, sentence
from tests import reference_models as reference
from tests.integration.cuda.quantised.formats import FORMATS, awq, fp8, gptq
from tests.integration.cuda.quantised.registered import unregister

V100, T4, H100 = (7, 0), (7, 5), (9, 0)
Fake = Callable[[tuple[int, int] | None], None]
TAKEN = ["awq", "gptq", "gptq-zero-points", "gptq-order", "packed", "floats-channel", "fp8", "fp8-block"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """Registered as on GPUs, whose capability is set by a call."""
    unregister()
    monkeypatch.setattr(type(current_platform), "supported_quantization", [])
    monkeypatch.setattr(
        type(current_platform), "supported_dtypes", property(lambda self: [torch.float16, torch.float32])
    )
    registration.install()
    registration.install()
    assert quantization.QUANTIZATION_METHODS.count(NAME) == 1

    def fake(capability: tuple[int, int] | None) -> None:
        found = None if capability is None else DeviceCapability(*capability)
        monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, **__: found)

    yield fake
    unregister()


def chosen(config: dict[str, Any], user_quant: str | None = None) -> Any:
    return QuantisedCheckpoint.override_quantization_method(config, user_quant)


def saved(folder: Path, config: dict[str, Any]) -> EngineArgs:
    """Arguments for a model without weights, as users give them."""
    reference.qwen3(4, 2, 64, layers=1).save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text()) | {"architectures": ["Qwen3ForCausalLM"], "quantization_config": config}
    path.write_text(json.dumps(written | {"dtype": "bfloat16"}))
    return EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=64)


@pytest.mark.parametrize("name", TAKEN)
def test_vllm_takes_this_packages_configuration_on_a_v100(name: str, gpu: Fake, tmp_path: Path) -> None:
    """Through all of vLLM's own checks: the method, the capability and the dtype, which is bfloat16 in the file."""
    gpu(V100)
    model = saved(tmp_path, FORMATS[name].config).create_model_config()
    assert model.quantization == NAME
    assert model.dtype == torch.float16
    from vllm.config import LoadConfig, VllmConfig

    found = VllmConfig.get_quantization_config(model, LoadConfig())
    assert isinstance(found, common.QuantisedConfig)
    assert found.checkpoint["quant_method"] == FORMATS[name].config["quant_method"]


@pytest.mark.parametrize("capability", [None, T4, (8, 0), H100])
def test_nothing_changes_on_other_devices(capability: tuple[int, int] | None, gpu: Fake) -> None:
    gpu(capability)
    for form in FORMATS.values():
        for user_quant in (None, form.config["quant_method"], "gptq_marlin", "awq_marlin", "marlin"):
            assert chosen(form.config, user_quant) is None
    assert chosen({"quant_method": "mxfp4"}) is None


def test_names_that_users_pass(gpu: Fake) -> None:
    gpu(V100)
    for user_quant in (None, "awq", "awq_marlin", "auto_awq", "marlin", NAME):
        assert chosen(awq().config, user_quant) == NAME
    assert chosen(awq().config, "bitsandbytes") is None
    assert chosen(awq().config | {"quant_method": "AWQ"}) == NAME
    assert chosen(FORMATS["packed"].config | {"quant_method": "compressed_tensors"}) == NAME


@pytest.mark.parametrize("own", [True, False])
def test_gptq_is_left_to_vllm_where_it_has_kernels_and_is_asked_for(
    own: bool, gpu: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.19 has them, newer versions do not."""
    gpu(V100)
    monkeypatch.setattr(compat, "has_own_gptq_kernels", lambda: own)
    assert chosen(gptq().config) == NAME
    assert chosen(gptq().config, "gptq") == (None if own else NAME)
    assert chosen(gptq().config | {"bits": 3}) == (None if own else NAME)


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": False, "data_type": "int"}
AS_AWQ, AS_GPTQ = ({"packing_format": f"auto_round:auto_{words}"} for words in ("awq", "gptq"))


@pytest.mark.parametrize("own", [True, False])
def test_auto_round_is_left_to_vllm_only_in_the_words_that_it_has_kernels_for(
    own: bool, gpu: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's kernel for AWQ's words is empty below compute capability 7.5, and writes nothing."""
    gpu(V100)
    monkeypatch.setattr(compat, "has_own_gptq_kernels", lambda: own)
    for user_quant in (None, "inc", "auto-round"):
        assert chosen(AUTO_ROUND | AS_AWQ, user_quant) == NAME
        assert chosen(AUTO_ROUND | {"packing_format": "auto_round", "backend": "awq"}, user_quant) == NAME
    assert chosen(AUTO_ROUND | AS_AWQ | {"quant_method": "inc", "bits": 2}) == NAME, "refused later, by name"
    for config in (AUTO_ROUND, AUTO_ROUND | AS_GPTQ):
        assert chosen(config) == NAME
        assert chosen(config, "inc") == (None if own else NAME)
        assert chosen(config | {"bits": 3}) == (None if own else NAME)
    gpu(T4)
    assert chosen(AUTO_ROUND | AS_AWQ) is None


@pytest.mark.parametrize("words", [AS_AWQ, AS_GPTQ])
def test_vllm_takes_this_packages_configuration_of_auto_round(words: Any, gpu: Fake, tmp_path: Path) -> None:
    gpu(V100)
    for user_quant in (None, "inc") if words is AS_AWQ else (None,):
        arguments = saved(tmp_path, AUTO_ROUND | words)
        arguments.quantization = user_quant
        assert arguments.create_model_config().quantization == NAME


def test_experts_are_not_left_to_vllm_by_the_name_of_its_method(gpu: Fake) -> None:
    gpu(V100)
    assert chosen(gptq().config, "moe_wna16") == chosen(awq().config, "moe_wna16") == NAME


@pytest.mark.parametrize(("config", "said"), [
    (gptq(symmetric=False).config, None),
    (gptq(8, symmetric=False).config, r"zero points of 8 bits \(sym: false\)"),
    (gptq(symmetric=False).config | {"bits": 3}, r"zero points of 3 bits \(sym: false\)"),
    (gptq(ordered=True).config, r"activation order \(desc_act\)"),
    (AUTO_ROUND, None),
])  # fmt: skip
def test_experts_that_are_left_to_vllm_are_checked(config: dict[str, Any], said: str | None) -> None:
    """Without --quantization, this package's loader looks at each zero point. It reads nothing else of these."""

    def engine(quantization: str, **changes: Any) -> Any:
        model = {"hf_config": SimpleNamespace(quantization_config=config), "is_moe": True, "quantization": quantization}
        return SimpleNamespace(model_config=SimpleNamespace(**(model | changes)))

    for name in ("gptq", "inc"):
        sentence = (
            f"vLLM's kernels for quantised experts do not read {said}; serve another checkpoint"
            if said
            else (
                rf"with --quantization {name}, zero points of experts \(sym: false\) are not checked, .*; leave --quant"
            )
        )
        with pytest.raises(Refusal, match=f"^{sentence}"):
            registration.check_experts(engine(name))
        registration.check_experts(engine(name, is_moe=False))
        registration.check_experts(engine(name, hf_config=SimpleNamespace(quantization_config=gptq().config)))
    registration.check_experts(engine(NAME))


UNCHECKED = set(quantization.QUANTIZATION_METHODS) - {"gptq", "awq", "fp8", "compressed-tensors", "inc", "auto-round"}


@pytest.mark.parametrize("method", sorted(UNCHECKED - {"gguf", "bitsandbytes", NAME}))
def test_every_method_of_vllm_is_loaded_checked_or_refused(method: str, gpu: Fake) -> None:
    gpu(V100)
    with pytest.raises(Refusal, match=r"; serve the model as an AWQ, GPTQ \(4 or 8 bits\)"):
        chosen({"quant_method": method})


@pytest.mark.parametrize("method", ["modelopt", "mxfp4", "torchao", "fbgemm_fp8"])
def test_methods_that_nobody_can_run_are_refused_with_what_to_serve(method: str, gpu: Fake, tmp_path: Path) -> None:
    gpu(V100)
    section = {"quant_method": method, "quant_algo": "NVFP4"}
    with pytest.raises(Exception, match="needs compute capability") as stop:
        saved(tmp_path, section).create_model_config()
    shown = sentence(stop.value)
    assert shown is not None
    assert shown.startswith(
        f"fastattention: quantization method {method.replace('_', '-')!r} needs compute capability "
    )
    assert "but this GPU has 7.0; serve the model as an AWQ, GPTQ (4 or 8 bits), compressed-tensors" in shown


def test_methods_with_kernels_in_vllm_stay_vllms(gpu: Fake) -> None:
    gpu(V100)
    assert chosen({"quant_method": "bitsandbytes"}) is None
    assert chosen({"quant_method": "one that vLLM does not know"}) is None


REFUSED = {
    "AWQ of 8 bits": (awq().config | {"bits": 8}, r"this AWQ checkpoint has bits = 8, .* only 4 bits with zero points"),
    "AWQ gemv": (awq().config | {"version": "GEMV"}, r"version = 'gemv', .* in the version 'gemm'"),
    "AWQ without zero points": (awq().config | {"zero_point": False}, r"zero_point = False"),
    "FP8 blocks": (fp8().config | {"weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\], but only"),
    "GPTQ of 3 bits": (gptq().config | {"bits": 3}, r"GPTQ with 3 bits does not run below"),
    "another method": ({"quant_method": "quark"}, r"quantization method 'quark' does not run with --quantization fast"),
    "no method": ({}, r"quantization method '' does not run"),
}


@pytest.mark.parametrize(("config", "words"), REFUSED.values(), ids=REFUSED)
def test_what_a_checkpoint_says_is_refused_before_a_layer_is_made(config: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal, match=rf"{words}.*; serve the model as an AWQ, GPTQ"):
        QuantisedCheckpoint.from_config(config)


def test_newer_gpus_need_the_option_for_tests(gpu: Fake) -> None:
    def config(section: dict[str, Any]) -> Any:
        return SimpleNamespace(additional_config={"fastattention": section}, compilation_config=None)

    gpu(H100)
    with (
        pytest.raises(
            Refusal, match=r"slow on this GPU of compute capability 9.0; remove --quantization fastattention"
        ),
        set_current_vllm_config(config({})),
    ):
        common.check_device()
    with set_current_vllm_config(config({"volta_kernels": "ptx"})):
        common.check_device()
    gpu(V100)
    with set_current_vllm_config(config({})):
        common.check_device()
