"""The planner refuses for a V100 what vLLM's layers with this package's configurations refuse, and nothing else.

Both read the same config.json. The capability and the number of ranks are faked. `make conformance` runs this file with
vLLM 0.19.1, the V100's version, so of tests/ it needs only formats.py and one_v100.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.config import CacheConfig, model
from vllm.model_executor import parameter as parameters
from vllm.model_executor.layers import linear as layers
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import get_quantization_config

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.cuda.quantised import linear_method
from fastattention_vllm.integration.cuda.quantised.registration import QuantisedCheckpoint
from fastattention_vllm.integration.cuda.quantised.scope import FORMATS as LOADED
from fastattention_vllm.integration.cuda.quantised.scope import INSTEAD, INTEGER_BITS
from fastattention_vllm.integration.cuda.volta import FastAttentionVoltaBackend
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.linear.volta import launch
from fastattention_vllm.linear.weights import BLOCK
from fastattention_vllm.plan import refused, speed
from fastattention_vllm.plan.errors import PlanError
from fastattention_vllm.plan.hardware import machine
from fastattention_vllm.plan.memory import resolve_kv_dtype
from fastattention_vllm.plan.model import MLP_MATRICES, shape_of
from tests.integration.cuda.quantised.formats import FORMATS, awq, floats, fp8, gptq, packed
from tests.integration.cuda.quantised.one_v100 import Model, one_rank, v100  # noqa: F401

HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_SIZE = 512, 1536, 8, 4, 64
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}
MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
PREFIX = "model.layers.0"


def by_the_engine(quantisation: dict[str, Any], wide: int) -> str | None:
    """Why the configuration or a layer is refused."""
    quantisation = copy.deepcopy(quantisation)
    try:
        if QuantisedCheckpoint.override_quantization_method(quantisation, None) is None:
            if quantisation["quant_method"] == "gptq":  # vLLM 0.19 reads 2 and 3 bits
                get_quantization_config("gptq").from_config(quantisation)
            return None
        config = QuantisedCheckpoint.from_config(quantisation)
        config.packed_modules_mapping = MERGED
        if hasattr(config, "modules_in_block_to_quantize"):  # vLLM reads it from the checkpoint's files
            config.modules_in_block_to_quantize = ["proj"]
        rest: dict[str, Any] = {"bias": False, "quant_config": config}
        QKVParallelLinear(HIDDEN, HEAD_SIZE, HEADS, KV_HEADS, prefix=f"{PREFIX}.self_attn.qkv_proj", **rest)
        RowParallelLinear(HEADS * HEAD_SIZE, HIDDEN, prefix=f"{PREFIX}.self_attn.o_proj", **rest)
        MergedColumnParallelLinear(HIDDEN, [wide, wide], prefix=f"{PREFIX}.mlp.gate_up_proj", **rest)
        RowParallelLinear(wide, HIDDEN, prefix=f"{PREFIX}.mlp.down_proj", **rest)
    except ValueError as error:  # vLLM refuses some by itself
        return str(error)
    return None


def check(quantisation: dict[str, Any], ranks: int, monkeypatch: pytest.MonkeyPatch, wide: int = WIDE) -> bool:
    """Whether both refuse."""
    for module in (layers, parameters, linear_method):
        for name, value in (("get_tensor_model_parallel_rank", 0), ("get_tensor_model_parallel_world_size", ranks)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda value=value: value)
    shape = shape_of(MODEL | {"intermediate_size": wide, "quantization_config": copy.deepcopy(quantisation)}, "here")
    planned, engines = refused.refusal(shape, ranks), by_the_engine(quantisation, wide)
    assert (planned is None) == (engines is None), (planned, engines)
    return planned is not None


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_formats_that_are_loaded(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if "packed-order" in name:
        try:
            QuantisedCheckpoint.from_config(copy.deepcopy(FORMATS[name].config))
        except ValueError:
            pytest.skip("vLLM 0.32 and newer, which no V100 runs, refuse this at any number of ranks")
    found = check(FORMATS[name].config, ranks, monkeypatch)
    assert not found or ranks > 1, "all are loaded without tensor parallelism"


def changed(config: dict[str, Any], weights: dict[str, Any] | None = None, **inputs: Any) -> dict[str, Any]:
    """compressed-tensors with other weights or activations."""
    found = copy.deepcopy(config)
    found["config_groups"]["group_0"]["weights"] |= weights or {}
    found["config_groups"]["group_0"] |= inputs
    return found


W8A8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 128,
    "sym": False,
    "data_type": "int",
}
AS_AWQ = AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}
REFUSED: dict[str, dict[str, Any]] = {
    "AutoRound of 8 bits in AWQ's words": AS_AWQ | {"bits": 8},
    "AutoRound of 2 bits in one layer": AS_AWQ | {"extra_config": {f"{PREFIX}.self_attn.o_proj": {"bits": 2}}},
    "AutoRound of 3 bits in some layers": AUTO_ROUND | {"extra_config": {r".*\.o_proj": {"bits": 3}}},
    "AutoRound without a part": AS_AWQ | {"extra_config": {f"{PREFIX}.self_attn.q_proj": {"bits": 16}}},
    "AutoRound in groups of 48": AUTO_ROUND | {"group_size": 48},
    "AWQ of 8 bits": awq().config | {"bits": 8},
    "AWQ gemv": awq().config | {"version": "GEMV"},
    "AWQ without zero points": awq().config | {"zero_point": False},
    "FP8 blocks": fp8().config | {"weight_block_size": [64, 64]},
    "GPTQ of 5 bits": gptq().config | {"bits": 5},
    "GPTQ of 3 bits in some layers": gptq().config | {"dynamic": {".*o_proj": {"bits": 3}}},
    "groups of 48": awq().config | {"group_size": 48},
    "groups of 16": changed(packed().config, {"group_size": 16}),
    "int W8A8": changed(packed(8, -1).config, input_activations=W8A8) | {"format": "int-quantized"},
    "packed W4A8": changed(packed().config, input_activations=W8A8),
    "NVFP4": changed(packed().config, NVFP4) | {"format": "nvfp4-pack-quantized"},
    "3 bits": changed(packed().config, {"num_bits": 3}),
    "FP8 blocks of compressed-tensors": changed(floats("block").config, {"block_structure": [64, 64]}),
    "FP8 of another format": floats().config | {"format": "dense"},
    "parts of different formats": fp8().config | {"ignored_layers": [f"{PREFIX}.self_attn.q_proj"]},
    "parts of different rules": packed().config | {"ignore": ["re:.*gate_proj"]},
    **{method: {"quant_method": method, "quant_algo": "NVFP4"} for method in ("modelopt", "mxfp4", "torchao", "quark")},
}


@pytest.mark.parametrize("name", REFUSED)
def test_formats_that_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(REFUSED[name], 1, monkeypatch)


UNTOUCHED: dict[str, dict[str, Any]] = {
    "AutoRound in AWQ's words": AS_AWQ,
    "AutoRound in GPTQ's words": AUTO_ROUND,
    "AutoRound called inc": AUTO_ROUND | {"quant_method": "inc", "sym": True, "bits": 8},
    "AutoRound of other blocks": AS_AWQ | {"bits": 8, "block_name_to_quantize": "model.visual.blocks"},
    "a rule of AutoRound": AS_AWQ | {"bits": 8, "extra_config": {r".*(attn|mlp).*": {"bits": 4}}},
    "AWQ gemv elsewhere": awq().config | {"modules_to_not_convert": ["visual"]},
    "all listed": fp8().config | {"ignored_layers": [f"{PREFIX}.self_attn.{name}_proj" for name in "qkvo"]},
    "a rule for attention": gptq().config | {"dynamic": {"-:.*attn.*": {}}},
    "a rule for activation order": gptq(ordered=True).config | {"dynamic": {"-:.*(o|down)_proj": {}}},
    "a rule of several parts": packed().config | {"ignore": ["re:.*(mtp|self_attn|linear_attn).*", "lm_head"]},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
}


@pytest.mark.parametrize("name", UNTOUCHED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_that_a_checkpoint_leaves_out(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if "order" in name and not _loads(UNTOUCHED[name]):
        pytest.skip("this vLLM refuses activation order")
    assert not check(UNTOUCHED[name], ranks, monkeypatch)


@pytest.mark.parametrize("wide", [1504, 1536, 1552, 1540, 1408])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "name", ["awq", "awq-32", "gptq-8-bits", "packed", "packed-zero-points", "floats-block", "fp8"]
)
def test_sizes(name: str, ranks: int, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(FORMATS[name].config, ranks, monkeypatch, wide)


@pytest.mark.skipif(not compat.has_own_gptq_kernels(), reason="newer versions than the V100's have no such kernels")
def test_gptq_of_3_bits_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not check(gptq().config | {"bits": 3}, 1, monkeypatch)


def test_model_types_that_vllm_refuses_in_float16_are_the_same() -> None:
    """Of the architectures that the planner supports."""
    by_vllm = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind): kind for kind in model._FLOAT16_NOT_SUPPORTED_MODELS}
    assert {
        architecture: kind for architecture, kind in by_vllm.items() if architecture in MLP_MATRICES
    } == refused.UNSTABLE_IN_FLOAT16


@pytest.mark.parametrize("asked", ["auto", "float16"])
def test_the_cache_that_vllm_makes_for_a_checkpoint_with_a_scheme(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In vLLM's own attention layer. The V100's version stores fp8 whatever the user says."""
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
    compat.ensure_backend_member()
    checkpoint = floats().config | {"kv_cache_scheme": scheme}
    for name, value in (("is_mm_prefix_lm", False), ("max_model_len", 1024), ("rswa_window", None)):
        monkeypatch.setattr(Model, name, value, raising=False)
    config = QuantisedCheckpoint.from_config(copy.deepcopy(checkpoint))
    config.packed_modules_mapping = MERGED
    cache: Any = CacheConfig(block_size=16, cache_dtype=asked)
    rest = {"prefix": f"{PREFIX}.{asked}.attn", "attn_backend": FastAttentionVoltaBackend}
    Attention(4, 64, 0.1, num_kv_heads=2, cache_config=cache, quant_config=config, **rest)
    shape = shape_of(MODEL | {"quantization_config": checkpoint}, "here")
    device = machine("v100-32g" if compat.has_own_gptq_kernels() else "t4-16g", 1)
    if device.kernels.obeys_cache_schemes and asked != "auto":
        with pytest.raises(PlanError, match="--kv-dtype float16 has no effect"):
            resolve_kv_dtype(shape, device, asked)
        assert cache.cache_dtype == "fp8"
        return
    assert cache.cache_dtype == resolve_kv_dtype(shape, device, asked)


def test_the_advice_and_the_limits_are_the_same() -> None:
    assert refused.INSTEAD == INSTEAD
    assert set(refused.FORMATS) == set(LOADED)
    assert tuple(refused.SMALLEST_GROUP) == INTEGER_BITS
    assert refused.BLOCK == BLOCK
    assert speed.TURN == launch.MOST_ROWS
    names = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8_e4m3"}
    assert {names[form]: turns for form, turns in speed.MOST_TURNS.items()} == launch.MOST_TURNS


def _loads(config: dict[str, Any]) -> bool:
    try:
        QuantisedCheckpoint.from_config(copy.deepcopy(config))
    except Refusal:
        raise
    except ValueError:
        return False
    return True
