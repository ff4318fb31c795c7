"""vLLM's own linear layers with quantised weights, as models build and load them, against products in float64.

The kernels' CPU reference multiplies. The capability is faked. `make conformance` runs this file with vLLM 0.19.1, 0.23.0
and newer versions, so it needs no other file of tests/ than formats.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.model_executor import parameter as parameters
from vllm.model_executor.layers import linear as layers
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from fastattention_vllm.integration.cuda.quantised import linear_method
from fastattention_vllm.integration.cuda.quantised.registration import QuantisedCheckpoint
from fastattention_vllm.integration.refusal import Refusal
from tests.integration.cuda.quantised.formats import FORMATS, Format, Stored, awq, floats, fp8, gptq, packed

K, N = 256, 384
MAPPING = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class Model:
    """What vLLM's layers read of a model's configuration."""

    dtype = torch.float16
    is_moe = False
    quantization = "fastattention"


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    config = VllmConfig()
    object.__setattr__(config, "model_config", Model())
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{Path(folder) / 'ranks'}", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        yield
    torch.set_default_dtype(default)


@pytest.fixture(autouse=True)
def v100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, **__: DeviceCapability(7, 0))


def config_of(form: Format, **changes: Any) -> Any:
    config = QuantisedCheckpoint.from_config(form.config | changes)
    config.packed_modules_mapping = MAPPING
    if hasattr(config, "modules_in_block_to_quantize"):  # vLLM reads it from the checkpoint's files
        config.modules_in_block_to_quantize = ["proj", "lm_head"]
    return config


def drawn(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) * 0.05


def load(layer: Any, stored: Stored, *part: Any) -> None:
    """As models do."""
    held = dict(layer.named_parameters())
    for name, tensor in stored.tensors.items():
        held[name].weight_loader(held[name], tensor, *part)


def finish(layer: Any) -> Any:
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def check(layer: Any, weight: torch.Tensor, rows: int = 5, bias: torch.Tensor | None = None) -> None:
    """The layer's product equals the stored weights' one within the rounding of its result to fp16."""
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(7), dtype=torch.float32).half()
    found = layer(x)
    found = found[0] if isinstance(found, tuple) else found
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().t()
    assert found.shape == exact.shape
    assert found.dtype == torch.float16
    # Half a unit in the last place of fp16; fp32 sums; FP8 weights are not rounded to fp16 in between, as `weight` is.
    assert bool(((found.double() - exact).abs() <= exact.abs() * 2**-10 + size * 2**-11).all())


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_column_parallel_layer(form: Format) -> None:
    stored = form.store(drawn(N, K))
    layer = ColumnParallelLinear(K, N, bias=True, quant_config=config_of(form), prefix="model.layers.0.o_proj")
    load(layer, stored)
    layer.bias.data.copy_(bias := drawn(1, N, seed=3)[0].half())
    check(finish(layer), stored.weight, bias=bias)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_merged_gate_and_up(form: Format) -> None:
    parts = [form.store(drawn(N, K, seed) * (1 + seed)) for seed in range(2)]
    layer = MergedColumnParallelLinear(K, [N, N], bias=False, quant_config=config_of(form), prefix="l.gate_up_proj")
    for index, part in enumerate(parts):
        load(layer, part, index)
    check(finish(layer), torch.cat([part.weight for part in parts]))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_merged_queries_keys_and_values(form: Format) -> None:
    heads, kv_heads, size = 4, 2, 64
    parts = {
        name: form.store(drawn(count * size, K, seed) * (1 + seed))
        for seed, (name, count) in enumerate((("q", heads), ("k", kv_heads), ("v", kv_heads)))
    }
    layer = QKVParallelLinear(
        K, size, heads, kv_heads, bias=False, quant_config=config_of(form), prefix="model.layers.0.self_attn.qkv_proj"
    )
    for name, part in parts.items():
        load(layer, part, name)
    check(finish(layer), torch.cat([part.weight for part in parts.values()]))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_two_has_its_columns(form: Format, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, rank, 2)
    stored = form.store(drawn(2 * N, K))
    layer = ColumnParallelLinear(K, 2 * N, bias=False, quant_config=config_of(form), prefix="model.layers.0.q_proj")
    load(layer, stored)
    check(finish(layer), stored.weight[rank * N : (rank + 1) * N])


@pytest.mark.parametrize("form", [form for name, form in FORMATS.items() if "order" not in name],
                         ids=[name for name in FORMATS if "order" not in name])  # fmt: skip
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_two_has_its_inputs(form: Format, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, rank, 2)
    stored = form.store(drawn(N, 2 * K))
    layer = RowParallelLinear(
        2 * K, N, bias=False, reduce_results=False, quant_config=config_of(form), prefix="model.layers.0.down_proj"
    )
    load(layer, stored)
    check(finish(layer), stored.weight[:, rank * K : (rank + 1) * K])


@pytest.mark.parametrize("form", [gptq(ordered=True), packed(ordered=True)], ids=["gptq", "packed"])
def test_activation_order_is_refused_where_ranks_divide_the_inputs(
    form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, 0, 2)
    with pytest.raises(Refusal, match=r"^model.layers.0.down_proj: activation order .* divided among 2 ranks; use --te"):
        RowParallelLinear(2 * K, N, bias=False, quant_config=config_of(form), prefix="model.layers.0.down_proj")


def test_one_kv_head_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1, 2)
    form, size = awq(), 128
    parts = {name: form.store(drawn(count * size, K, seed)) for seed, (name, count) in enumerate(zip("qkv", (4, 1, 1)))}
    layer = QKVParallelLinear(K, size, 4, 1, bias=False, quant_config=config_of(form), prefix="l.qkv_proj")
    for name, part in parts.items():
        load(layer, part, name)
    check(finish(layer), torch.cat([parts["q"].weight[2 * size :], parts["k"].weight, parts["v"].weight]))


def test_parts_that_are_one_tensor_in_the_checkpoint() -> None:
    """As in Phi-3. The scale per tensor then belongs to all parts."""
    for form in (awq(), packed(), fp8(), floats("tensor")):
        stored = form.store(drawn(2 * N, K))
        layer = MergedColumnParallelLinear(K, [N, N], bias=False, quant_config=config_of(form), prefix="l.gate_up_proj")
        load(layer, stored)
        check(finish(layer), stored.weight)


@pytest.mark.parametrize(
    "form", [awq(), gptq(), gptq(ordered=True), packed()], ids=["awq", "gptq", "gptq-order", "packed"]
)
def test_an_output_layer_that_is_quantised(form: Format) -> None:
    rules = {"lm_head": True}
    if form.config["quant_method"] == "compressed-tensors":
        group = form.config["config_groups"]["group_0"] | {"targets": ["Linear", "re:.*lm_head"]}
        rules = {"ignore": [], "config_groups": {"group_0": group}}
    stored = form.store(drawn(N, K))
    layer = ParallelLMHead(N, K, quant_config=config_of(form, **rules), prefix="lm_head")
    load(layer, stored)
    finish(layer)
    layer.forward = lambda x: layer.quant_method.apply(layer, x)
    check(layer, stored.weight)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_an_output_layer_that_is_not_quantised(form: Format) -> None:
    layer = ParallelLMHead(N, K, quant_config=config_of(form), prefix="lm_head")
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert layer.weight.dtype == torch.float16


IGNORING = {
    "awq": (awq(), {"modules_to_not_convert": ["mtp", "up_proj"]}),
    "fp8": (fp8(), {"modules_to_not_convert": ["mtp.o_proj", "l.gate_proj", "l.up_proj"]}),
    "fp8-ignored_layers": (fp8(), {"ignored_layers": ["mtp.o_proj", "l.gate_proj", "l.up_proj"]}),
    "packed": (packed(), {"ignore": ["lm_head", "re:.*mtp.*", "l.gate_proj", "l.up_proj"]}),
    "gptq": (gptq(), {"dynamic": {r"-:.*mtp.*": {}, r"-:.*gate_up.*": {}}}),
}


@pytest.mark.parametrize(("form", "rules"), IGNORING.values(), ids=IGNORING)
def test_layers_that_the_checkpoint_ignores_stay_unquantised(form: Format, rules: dict[str, Any]) -> None:
    if form.config["quant_method"] == "awq":
        rules = {"modules_to_not_convert": ["mtp", "gate_proj", "up_proj"]}
    config = config_of(form, **rules)
    method = ReplicatedLinear(K, N, bias=False, quant_config=config, prefix="mtp.o_proj").quant_method
    assert isinstance(method, UnquantizedLinearMethod)
    merged = MergedColumnParallelLinear(K, [N, N], bias=False, quant_config=config, prefix="l.gate_up_proj")
    assert isinstance(merged.quant_method, UnquantizedLinearMethod)
    method = ReplicatedLinear(K, N, bias=False, quant_config=config, prefix="model.layers.0.o_proj").quant_method
    assert isinstance(method, linear_method.QuantisedLinearMethod)


def test_a_rule_of_gptq_changes_bits_and_group_size() -> None:
    rules = {r"+:.*special.*": {"bits": 8, "group_size": 32, "sym": False}}
    form = gptq(8, 32, symmetric=False)
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(gptq(), dynamic=rules), prefix="l.special_proj")
    stored = form.store(drawn(N, K))
    load(layer, stored)
    check(finish(layer), stored.weight)


def test_the_parts_of_a_packed_matrix_are_freed() -> None:
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(awq()), prefix="l.o_proj")
    load(layer, awq().store(drawn(N, K)))
    finish(layer)
    held = {name: parameter for name, parameter in layer.named_parameters()}
    assert set(held) == {"qweight", "packed_scales"}, "LoRA looks for qweight"
    assert sum(one.numel() * one.element_size() for one in held.values()) < K * N * 0.55


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_each_missing_tensor_is_named(form: Format) -> None:
    stored = form.store(drawn(N, K))
    required = set(stored.tensors) - {"weight_shape", "input_scale"}
    required -= set() if form.config.get("desc_act") else {"g_idx"}
    for name in required:
        layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(form), prefix="model.layers.3.o_proj")
        load(layer, Stored({other: t for other, t in stored.tensors.items() if other != name}, stored.weight))
        with pytest.raises(Refusal, match=rf"^model.layers.3.o_proj: this layer needs {name}, but the checkpoint has no"):
            finish(layer)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_missing_part_of_a_merged_layer_is_noticed(form: Format) -> None:
    stored = form.store(drawn(N, K))
    layer = MergedColumnParallelLinear(K, [N, N], bias=False, quant_config=config_of(form), prefix="l.gate_up_proj")
    load(layer, stored, 0)
    name = next(name for name in stored.tensors if "scale" in name and name != "input_scale")
    load(layer, Stored({other: t for other, t in stored.tensors.items() if other != name}, stored.weight), 1)
    with pytest.raises(Refusal, match=rf"^l.gate_up_proj: this layer needs {name}, but the checkpoint has only \d+ of \d+"):
        finish(layer)


@pytest.mark.parametrize("change", ["longer", "shorter", "wider", "narrower"])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_each_misshapen_tensor_is_named(form: Format, change: str) -> None:
    stored = form.store(drawn(N, K))
    for name, tensor in stored.tensors.items():
        axis = 0 if change in ("longer", "shorter") else 1
        if tensor.dim() <= axis or tensor.shape[axis] < 2 and change in ("shorter", "narrower") or name == "input_scale":
            continue
        if change in ("longer", "wider"):
            wrong = torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis)
        else:
            wrong = tensor.narrow(axis, 0, tensor.shape[axis] - 1)
        layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(form), prefix="model.layers.3.o_proj")
        held = dict(layer.named_parameters())
        with pytest.raises(Refusal, match=rf"^model.layers.3.o_proj: the checkpoint's {name} has shape \[\d+"):
            held[name].weight_loader(held[name], wrong)


def test_other_groups_in_a_merged_layer_are_refused() -> None:
    form = gptq(ordered=True)
    one, other = form.store(drawn(N, K)), form.store(drawn(N, K))
    other.tensors["g_idx"] = other.tensors["g_idx"].flip(0)
    layer = MergedColumnParallelLinear(K, [N, N], bias=False, quant_config=config_of(form), prefix="l.gate_up_proj")
    load(layer, one, 0)
    with pytest.raises(Refusal, match=r"^l.gate_up_proj: g_idx differs between the parts of this merged layer"):
        load(layer, other, 1)


def test_groups_of_other_sizes_are_refused() -> None:
    form = gptq(ordered=True)
    stored = form.store(drawn(N, K))
    stored.tensors["g_idx"][:3] = 1
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(form), prefix="l.o_proj")
    load(layer, stored)
    with pytest.raises(Refusal, match=r"^l.o_proj: the groups in g_idx do not have 128 inputs each"):
        finish(layer)


def test_zero_points_of_symmetric_weights_are_refused() -> None:
    stored = gptq(symmetric=False).store(drawn(N, K))
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(gptq()), prefix="l.o_proj")
    load(layer, stored)
    with pytest.raises(Refusal, match=r"^l.o_proj: the checkpoint says sym, but qzeros has other zero points"):
        finish(layer)


def test_bad_values_end_in_a_sentence_with_the_layers_name() -> None:
    stored = awq().store(drawn(N, K))
    stored.tensors["scales"][0, 3] = float("inf")
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(awq()), prefix="l.o_proj")
    load(layer, stored)
    with pytest.raises(Refusal, match=r"^l.o_proj: .*finite.*; serve another checkpoint\.$"):
        finish(layer)


def test_a_shape_that_no_kernel_takes_is_refused_with_the_layers_name() -> None:
    with pytest.raises(Refusal, match=r"^l.o_proj: .*; use another --tensor-parallel-size or another checkpoint\.$"):
        ReplicatedLinear(K, N + 4, bias=False, quant_config=config_of(floats()), prefix="l.o_proj")


def test_a_group_that_ranks_divide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0, 2)
    with pytest.raises(Refusal, match=r"^l.down_proj: each rank has 192 of 384 inputs, .* group size 128; use a smaller"):
        RowParallelLinear(384, N, bias=False, quant_config=config_of(awq()), prefix="l.down_proj")


def test_a_block_of_scales_that_parts_divide_is_refused() -> None:
    with pytest.raises(Refusal, match=r"^l.gate_up_proj: a part of 192 inputs or outputs is not a multiple of the 128"):
        MergedColumnParallelLinear(
            K, [192, 192], bias=False, quant_config=config_of(fp8(block=True)), prefix="l.gate_up_proj"
        )


WRONG = {
    "NVFP4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
    "MXFP4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
    "W8A8": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "3 bits": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True},
}
FORMS = {"NVFP4": "nvfp4-pack-quantized", "MXFP4": "mxfp4-pack-quantized", "W8A8": "int-quantized"}


@pytest.mark.parametrize("name", WRONG)
def test_formats_without_kernels_are_refused_with_the_layers_name(name: str) -> None:
    config = packed().config | {"format": FORMS.get(name, "pack-quantized")}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True} if name == "W8A8" else None
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": WRONG[name], "input_activations": inputs}}
    found = QuantisedCheckpoint.from_config(config)
    with pytest.raises(Refusal, match=r"^l.o_proj: compressed-tensors with .* does not run below .*; serve the model as"):
        ReplicatedLinear(K, N, bias=False, quant_config=found, prefix="l.o_proj")


def pretend(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    """As if this process were one of several tensor parallel ranks."""
    for module in (layers, parameters, linear_method):
        for name, value in (("get_tensor_model_parallel_rank", rank), ("get_tensor_model_parallel_world_size", ranks)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda value=value: value)


def test_a_linear_base_is_what_models_use() -> None:
    assert issubclass(ColumnParallelLinear, LinearBase)
