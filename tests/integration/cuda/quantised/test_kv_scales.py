"""The KV cache that a compressed-tensors checkpoint asks for (kv_cache_scheme), in vLLM's own attention layers.

The capability is faked. `make conformance` runs this file with vLLM 0.19.1, the V100's version, and newer ones, so of
tests/ it needs only formats.py and one_v100.py.
"""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

from fastattention_vllm.integration import compat, support
from fastattention_vllm.integration.cuda.quantised.registration import QuantisedCheckpoint
from fastattention_vllm.integration.cuda.volta import FastAttentionVoltaBackend
from fastattention_vllm.integration.host_layers import layers
from fastattention_vllm.integration.refusal import Refusal
from tests.integration.cuda.quantised import one_v100
from tests.integration.cuda.quantised.formats import floats
from tests.integration.cuda.quantised.one_v100 import one_rank, v100  # noqa: F401

KV_HEADS, HEAD_SIZE = 2, 64
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
CHECKPOINT = floats().config | {"kv_cache_scheme": SCHEME}
METHOD = compressed_tensors.CompressedTensorsKVCacheMethod
numbers = itertools.count()


def load_as_older_versions(self: Any, layer: Any) -> None:
    """0.19.1: the tensors alone."""
    layer._k_scale, layer._v_scale, layer._q_scale = layer.k_scale, layer.v_scale, layer.q_scale
    for one in "kvq":
        delattr(layer, f"{one}_scale")
        delattr(layer, f"{one}_zero_point")


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention layers ask of a model's configuration."""
    compat.ensure_backend_member()
    for name, value in (("is_mm_prefix_lm", False), ("max_model_len", 1024)):
        monkeypatch.setattr(one_v100.Model, name, value, raising=False)


@pytest.fixture(params=["this version", "older versions"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's method, without what this package may have put around it."""
    genuine = getattr(METHOD.process_weights_after_loading, "__wrapped__", METHOD.process_weights_after_loading)
    older = request.param == "older versions"
    monkeypatch.setattr(METHOD, "process_weights_after_loading", load_as_older_versions if older else genuine)


def attention(cache: CacheConfig) -> Any:
    config = QuantisedCheckpoint.from_config(copy.deepcopy(CHECKPOINT))
    config.packed_modules_mapping = {}
    return Attention(
        4, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, cache_config=cache, quant_config=config,
        prefix=f"model.layers.{next(numbers)}.self_attn.attn", attn_backend=FastAttentionVoltaBackend,
    )  # fmt: skip


def load(layer: Any, key: float, value: float) -> None:
    """As models load them."""
    for name, scale in (("k_scale", key), ("v_scale", value)):
        held = getattr(layer, name)
        loader = getattr(held, "weight_loader", lambda held, loaded: held.data.copy_(loaded))
        loader(held, torch.tensor([scale]))
    layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.usefixtures("method")
def test_the_checkpoints_scales_are_those_of_the_layer() -> None:
    cache = CacheConfig(block_size=16)
    layer = attention(cache)
    assert cache.cache_dtype == layer.kv_cache_dtype == "fp8"
    load(layer, 0.25, 0.0625)
    assert layer.impl.scales(layer) == (0.25, 0.0625)
    assert (float(layer._k_scale), float(layer._v_scale)) == (0.25, 0.0625), "vLLM's own backends read the tensors"


@pytest.mark.usefixtures("method")
def test_other_weights_bring_other_scales() -> None:
    layer = attention(CacheConfig(block_size=16))
    load(layer, 0.25, 0.0625)
    layer.quant_method.create_weights(layer)
    load(layer, 2.0, 0.5)
    assert layer.impl.scales(layer) == (2.0, 0.5)
    assert not {"_k_scale", "_v_scale"} & set(dict(layer.named_parameters())), "vLLM reloads parameters in place"


@pytest.mark.parametrize("asked", ["auto", "fp8_e4m3", "float16", "bfloat16"])
def test_what_is_foretold_is_what_the_layer_does(asked: Any) -> None:
    cache = CacheConfig(block_size=16, cache_dtype=asked)
    foretold = support.kv_cache_dtype(config_with(cache, CHECKPOINT))
    assert attention(cache).kv_cache_dtype == foretold
    assert support.kv_cache_dtype(config_with(cache, floats().config)) == cache.cache_dtype


def config_with(cache: Any, checkpoint: dict[str, Any], **options: Any) -> Any:
    return SimpleNamespace(
        cache_config=cache,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(quantization_config=checkpoint)),
        additional_config={"fastattention": options},
    )


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(support.logger, "info_once", lambda line, *values: lines.append(line % values))
    return lines


@pytest.mark.parametrize(("asked", "overrides", "line"), [
    ("auto", True, "KV cache: fp8, because the checkpoint's kv_cache_scheme says so."),
    ("float16", True, "KV cache: fp8, because the checkpoint's kv_cache_scheme says so; --kv-cache-dtype float16 has "
                      "no effect with this vLLM."),
    ("fp8_e5m2", True, "KV cache: fp8, because the checkpoint's kv_cache_scheme says so; --kv-cache-dtype fp8_e5m2 "
                       "has no effect with this vLLM."),
    ("fp8_e4m3", True, None),
    ("float16", False, None),
])  # fmt: skip
def test_who_chose_the_cache_is_said_once(
    asked: str, overrides: bool, line: str | None, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "checkpoint_overrides_kv_cache_dtype", lambda: overrides)
    cache = SimpleNamespace(cache_dtype=asked)
    support.say_what_chooses_the_cache(config_with(cache, CHECKPOINT))
    support.say_what_chooses_the_cache(config_with(cache, floats().config))
    assert said == ([] if line is None else [line])


@pytest.mark.parametrize(("checkpoint", "named"), [
    (CHECKPOINT, r"the fp8 KV cache of this checkpoint \(kv_cache_scheme\)"),
    (floats().config, "--kv-cache-dtype fp8"),
])  # fmt: skip
def test_host_layers_are_refused_by_the_name_of_what_chose_the_cache(checkpoint: dict[str, Any], named: str) -> None:
    impl = attention(CacheConfig(block_size=16, cache_dtype="fp8")).impl
    config = config_with(SimpleNamespace(cache_dtype="fp8"), checkpoint)
    with pytest.raises(Refusal, match=rf"^host layers on this device do not support {named}; set host_kv_layers to 0"):
        layers.check_layer(impl, config)
