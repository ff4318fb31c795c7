"""vLLM's own linear layers with quantised weights, as models build and load them, against products in float64.

The kernels' CPU reference multiplies. The capability is faked. `make conformance` runs this file with vLLM 0.19.1,
0.23.0 and newer versions, so of tests/ it needs only formats.py and one_v100.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from vllm.config import get_current_vllm_config, set_current_vllm_config
from vllm.model_executor import parameter as parameters
from vllm.model_executor.layers import linear as layers
from vllm.model_executor.layers import vocab_parallel_embedding as embeddings
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.cuda.quantised import config as common
from fastattention_vllm.integration.cuda.quantised import gptq as gptq_module
from fastattention_vllm.integration.cuda.quantised import linear_method, unquantised_method
from fastattention_vllm.integration.cuda.quantised.loading import Loading
from fastattention_vllm.integration.cuda.quantised.registration import QuantisedCheckpoint
from fastattention_vllm.integration.refusal import Refusal
from tests.integration.cuda.quantised.formats import FORMATS, Format, Stored, awq, floats, fp8, gptq, packed
from tests.integration.cuda.quantised.one_v100 import one_rank, v100  # noqa: F401

K, N = 256, 384
MAPPING = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def config_of(form: Format, **changes: Any) -> Any:
    config = QuantisedCheckpoint.from_config(form.config | changes)
    config.packed_modules_mapping = MAPPING
    if hasattr(config, "modules_in_block_to_quantize"):  # vLLM reads it from the checkpoint's files
        config.modules_in_block_to_quantize = ["proj", "lm_head"]
    return config


def _is_loaded(form: Format) -> bool:
    """vLLM 0.32 refuses activation order of compressed-tensors by itself."""
    try:
        QuantisedCheckpoint.from_config(dict(form.config))
    except ValueError as error:
        if "is no longer supported" not in str(error):
            raise
        return False
    return True


def auto_round(words: Format, symmetric: bool, **rules: Any) -> Format:
    """A checkpoint of AutoRound in the words of another one."""
    method = words.config["quant_method"]
    config = {
        "quant_method": "auto-round",
        "packing_format": f"auto_round:auto_{method}",
        "bits": words.config["bits"],
        "group_size": words.config["group_size"],
        "sym": symmetric,
        "data_type": "int",
    }
    return Format(config | rules, words.store)


QUICK = ("awq", "gptq-8-bits-zero-points", "gptq-order", "packed-zero-points", "floats-tensor", "fp8-block")
LOADED = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.more)
    for name, form in FORMATS.items()
    if _is_loaded(form)
]
IN_ORDER = [one for one in LOADED if "order" not in str(one.values[0])]
IN_ANY_ORDER = [one for one in LOADED if one.values[0] in ("gptq-order", "packed-order", "packed-order-dynamic")]


def drawn(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) * 0.05


@functools.cache
def _stored(name: str, n: int, k: int, seed: int) -> Stored:
    return FORMATS[name].store(drawn(n, k, seed) * (1 + seed))


def stored_as(name: str, n: int = N, k: int = K, seed: int = 0) -> Stored:
    """A random matrix; its tensors may be replaced."""
    found = _stored(name, n, k, seed)
    return Stored(dict(found.tensors), found.weight)


def load(layer: Any, stored: Stored, *part: Any) -> None:
    """As some models do, Qwen3.5 among them: tensors without a parameter are skipped."""
    held = dict(layer.named_parameters())
    for name, tensor in stored.tensors.items():
        if name in held:
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


@pytest.mark.parametrize("name", LOADED)
def test_a_column_parallel_layer(name: str) -> None:
    stored, config = stored_as(name), config_of(FORMATS[name])
    layer = ColumnParallelLinear(K, N, bias=True, quant_config=config, prefix="model.layers.0.o_proj")
    load(layer, stored)
    layer.bias.data.copy_(bias := drawn(1, N, seed=3)[0].half())
    check(finish(layer), stored.weight, bias=bias)


@pytest.mark.parametrize("name", LOADED)
def test_merged_gate_and_up(name: str) -> None:
    parts, config = [stored_as(name, seed=seed) for seed in range(2)], config_of(FORMATS[name])
    layer = MergedColumnParallelLinear(K, [N, N], bias=False, quant_config=config, prefix="l.gate_up_proj")
    for index, part in enumerate(parts):
        load(layer, part, index)
    check(finish(layer), torch.cat([part.weight for part in parts]))


def reload(model: torch.nn.Module, load_all: Callable[[], None]) -> None:
    """As vLLM's ``reload_weights`` does, whose workers have set no configuration in vLLM 0.19.1."""
    with set_current_vllm_config(None):  # type: ignore[arg-type]
        initialize_layerwise_reload(model)
        load_all()
        finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float16))


@pytest.mark.parametrize("name", LOADED)
def test_a_merged_layer_is_loaded_again(name: str) -> None:
    """The kernels' form is replaced in place, because captured graphs hold its addresses."""
    parts, again = ([stored_as(name, seed=seed) for seed in seeds] for seeds in ((0, 1), (2, 3)))
    layer = MergedColumnParallelLinear(
        K, [N, N], bias=False, quant_config=config_of(FORMATS[name]), prefix="l.gate_up_proj"
    )
    record_metadata_for_reloading(layer)
    for index, part in enumerate(parts):
        load(layer, part, index)
    finish(layer)
    held = {held_as: one.data_ptr() for held_as, one in layer.named_parameters()}
    for loaded in (again, parts):
        reload(layer, lambda loaded=loaded: [load(layer, part, index) for index, part in enumerate(loaded)])
        check(layer, torch.cat([part.weight for part in loaded]))
        assert {held_as: one.data_ptr() for held_as, one in layer.named_parameters()} == held
    lacking = Stored(dict(list(again[0].tensors.items())[1:]), again[0].weight)
    with pytest.raises(Refusal, match="this layer needs"):
        reload(layer, lambda: [load(layer, part, index) for index, part in enumerate((again[1], lacking))])


@pytest.mark.parametrize("name", LOADED)
def test_merged_queries_keys_and_values(name: str) -> None:
    parts = {"q": stored_as(name, 256), "k": stored_as(name, 128, seed=1), "v": stored_as(name, 128, seed=2)}
    layer = QKVParallelLinear(K, 64, 4, 2, bias=False, quant_config=config_of(FORMATS[name]), prefix="l.qkv_proj")
    for part, stored in parts.items():
        load(layer, stored, part)
    check(finish(layer), torch.cat([stored.weight for stored in parts.values()]))


@pytest.mark.parametrize("name", LOADED)
def test_the_second_of_two_ranks_has_its_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1, 2)
    stored, config = stored_as(name, n=2 * 128), config_of(FORMATS[name])
    layer = ColumnParallelLinear(K, 2 * 128, bias=False, quant_config=config, prefix="model.layers.0.q_proj")
    load(layer, stored)
    check(finish(layer), stored.weight[128:])


@pytest.mark.parametrize("name", IN_ORDER)
def test_the_second_of_two_ranks_has_its_inputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1, 2)
    stored, config = stored_as(name), config_of(FORMATS[name])
    layer = RowParallelLinear(K, N, bias=False, reduce_results=False, quant_config=config, prefix="l.down_proj")
    load(layer, stored)
    check(finish(layer), stored.weight[:, K // 2 :])


@pytest.mark.parametrize("name", IN_ANY_ORDER)
def test_activation_order_is_refused_where_ranks_divide_the_inputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0, 2)
    config = config_of(FORMATS[name])
    with pytest.raises(
        Refusal, match=r"^l.down_proj: activation order .* divided among 2 ranks; use --tensor-parallel"
    ):
        RowParallelLinear(K, N, bias=False, quant_config=config, prefix="l.down_proj")


def test_one_kv_head_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1, 2)
    parts = {"q": stored_as("awq", 512), "k": stored_as("awq", 128, seed=1), "v": stored_as("awq", 128, seed=2)}
    layer = QKVParallelLinear(K, 128, 4, 1, bias=False, quant_config=config_of(awq()), prefix="l.qkv_proj")
    for part, stored in parts.items():
        load(layer, stored, part)
    check(finish(layer), torch.cat([parts["q"].weight[256:], parts["k"].weight, parts["v"].weight]))


@pytest.mark.parametrize("name", ["awq", "gptq", "packed", "fp8", "floats-tensor"])
def test_parts_that_are_one_tensor_in_the_checkpoint(name: str) -> None:
    """As in Phi-3. A scale per tensor then belongs to all parts."""
    stored, config = stored_as(name), config_of(FORMATS[name])
    layer = MergedColumnParallelLinear(K, [N // 2, N // 2], bias=False, quant_config=config, prefix="l.gate_up_proj")
    load(layer, stored)
    check(finish(layer), stored.weight)


FUSED = ["awq", "gptq", "packed-zero-points", "fp8", "fp8-block", "floats-block", "floats-channel"]


@pytest.mark.parametrize("name", FUSED)
def test_queries_keys_and_values_that_are_one_tensor_in_the_checkpoint(name: str) -> None:
    stored = stored_as(name, 512 + 2 * 256)
    layer = QKVParallelLinear(K, 128, 4, 2, bias=False, quant_config=config_of(FORMATS[name]), prefix="l.qkv_proj")
    load(layer, stored)
    check(finish(layer), stored.weight)


@pytest.mark.parametrize("name", [*FUSED, "unquantised"])
def test_one_tensor_with_fewer_kv_heads_than_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each KV head is on two of four ranks, so that a rank has more than a quarter of the tensor."""
    pretend(monkeypatch, 3, 4)
    if name == "unquantised":
        weight = drawn(512 + 2 * 256, K).half()
        stored, config = Stored({"weight": weight}, weight), config_of(awq(), modules_to_not_convert=["_proj"])
    else:
        stored, config = stored_as(name, 512 + 2 * 256), config_of(FORMATS[name])
    layer = QKVParallelLinear(K, 128, 4, 2, bias=False, quant_config=config, prefix="l.qkv_proj")
    load(layer, stored)
    check(finish(layer), torch.cat([stored.weight[384:512], stored.weight[640:768], stored.weight[896:]]))


@pytest.mark.parametrize("name", ["awq", "fp8-block", "floats-channel"])
@pytest.mark.parametrize("n", [512 + 256 + 128, 512 + 3 * 256])
def test_one_tensor_of_another_number_of_heads_is_refused(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 3, 4)
    layer = QKVParallelLinear(K, 128, 4, 2, bias=False, quant_config=config_of(FORMATS[name]), prefix="l.qkv_proj")
    held = dict(layer.named_parameters())
    for other, tensor in stored_as(name, n).tensors.items():
        with pytest.raises(Refusal, match=rf"^l.qkv_proj: the checkpoint's {other} has shape .* on each of 4 ranks"):
            held[other].weight_loader(held[other], tensor)


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq-order", "packed"])
def test_an_output_layer_that_is_quantised(name: str) -> None:
    form, stored = FORMATS[name], stored_as(name)
    rules: dict[str, Any] = {"lm_head": True}
    if name == "packed":
        group = form.config["config_groups"]["group_0"] | {"targets": ["Linear", "re:.*lm_head"]}
        rules = {"ignore": [], "config_groups": {"group_0": group}}
    layer = ParallelLMHead(N, K, quant_config=config_of(form, **rules), prefix="lm_head")
    load(layer, stored)
    finish(layer)
    check(lambda x: layer.quant_method.apply(layer, x), stored.weight)


@pytest.mark.parametrize("name", ["awq", "gptq", "packed"])
def test_an_output_layer_that_vllm_pads(name: str) -> None:
    form, stored = FORMATS[name], stored_as(name, n=1000)
    rules: dict[str, Any] = {"lm_head": True}
    if name == "packed":
        rules = {
            "ignore": [],
            "config_groups": {"group_0": form.config["config_groups"]["group_0"] | {"targets": ["re:.*"]}},
        }
        layer = ParallelLMHead(1000, K, quant_config=config_of(form, **rules), prefix="lm_head")
        load(layer, stored)
        finish(layer)
        check(lambda x: layer.quant_method.apply(layer, x)[:, :1000], stored.weight)
        return
    with pytest.raises(
        Refusal, match=r"^lm_head: vLLM pads .* from 1000 to 1024 columns, .*; serve a checkpoint whose lm"
    ):
        ParallelLMHead(1000, K, quant_config=config_of(form, **rules), prefix="lm_head")


@pytest.mark.parametrize("name", ["awq", "gptq", "packed", "floats-channel", "fp8"])
def test_an_output_layer_that_is_not_quantised(name: str) -> None:
    layer = ParallelLMHead(N, K, quant_config=config_of(FORMATS[name]), prefix="lm_head")
    assert {name: held.dtype for name, held in layer.named_parameters()} == {"weight": torch.float16}


@pytest.mark.parametrize("name", ["awq", "gptq", "packed", "fp8", "floats-channel"])
def test_an_output_layer_that_is_quantised_without_a_word_is_refused(name: str) -> None:
    layer = ParallelLMHead(N, K, quant_config=config_of(FORMATS[name]), prefix="lm_head")
    float8 = name in ("fp8", "floats-channel")
    wanted = "the checkpoint's weight has dtype torch.float8_e4m3fn" if float8 else "this layer needs weight, but the"
    if not float8:
        load(layer, stored_as(name))  # vLLM's models skip tensors without a parameter
    with pytest.raises(Refusal, match=rf"^lm_head: {wanted}.*serve another checkpoint\.$"):
        load(layer, stored_as(name)) if float8 else finish(layer)


@pytest.mark.parametrize("rank", range(4))
def test_an_output_layer_of_several_ranks_is_loaded(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 150 is padded to 192: ranks have 48, 48, 48 and 6 rows of the checkpoint."""
    pretend(monkeypatch, rank, 4)
    layer, weight = ParallelLMHead(150, K, quant_config=config_of(awq()), prefix="lm_head"), drawn(150, K).half()
    load(layer, Stored({"weight": weight}, weight))
    finish(layer)
    rows = weight[48 * rank : 48 * (rank + 1)]
    assert torch.equal(layer.weight[: len(rows)], rows)
    assert layer.weight.shape == (48, K)
    assert not layer.weight.isnan().any()


def test_an_output_layer_that_is_not_quantised_is_loaded_again() -> None:
    layer = ParallelLMHead(N, K, quant_config=config_of(awq()), prefix="lm_head")
    record_metadata_for_reloading(layer)
    first, second = (drawn(N, K, seed).half() for seed in range(2))
    load(layer, Stored({"weight": first}, first))
    finish(layer)
    reload(layer, lambda: load(layer, Stored({"weight": second}, second)))
    assert torch.equal(layer.weight, second)


@pytest.mark.usefixtures("zeros_in_new_memory")
def test_an_output_layer_must_be_complete_when_it_is_loaded_again() -> None:
    layer = ParallelLMHead(N, K, bias=True, quant_config=config_of(awq()), prefix="lm_head")
    record_metadata_for_reloading(layer)
    load(layer, Stored({"weight": drawn(N, K).half(), "bias": drawn(1, N)[0].half()}, drawn(N, K)))
    finish(layer)
    with pytest.raises(Refusal, match=r"^lm_head: this layer needs weight, but the checkpoint has none"):
        reload(layer, lambda: load(layer, Stored({"bias": drawn(1, N, 1)[0].half()}, drawn(N, K))))


def test_an_output_layer_may_be_tied_to_the_embeddings() -> None:
    embedding = VocabParallelEmbedding(N, K, prefix="embed_tokens")
    embedding.weight.data.copy_(weight := drawn(N, K).half())
    layer = ParallelLMHead(N, K, quant_config=config_of(awq()), prefix="lm_head").tie_weights(embedding)
    assert torch.equal(finish(layer).weight, weight)


def test_a_drafters_output_layer_may_be_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM puts it in after loading."""
    monkeypatch.setattr(get_current_vllm_config(), "speculative_config", SimpleNamespace())
    layer = finish(ParallelLMHead(N, K, quant_config=config_of(awq()), prefix="lm_head"))
    assert bool(layer.weight.isnan().all()), "and not as the memory was"


AUTO_ROUND = {
    "awq": auto_round(awq(), symmetric=False),
    "awq-symmetric": auto_round(awq(32), symmetric=True),
    "gptq": auto_round(gptq(), symmetric=True),
    "gptq-zero-points": auto_round(gptq(symmetric=False), symmetric=False),
    "gptq-8-bits": auto_round(gptq(bits=8), symmetric=True),
}


@pytest.mark.parametrize("method", ["auto-round", "inc"])
@pytest.mark.parametrize("name", AUTO_ROUND)
def test_checkpoints_of_auto_round(name: str, method: str) -> None:
    form = AUTO_ROUND[name]
    parts = {part: form.store(drawn(n, K, n)) for part, n in {"q": 256, "k": 128, "v": 128}.items()}
    config = config_of(form, quant_method=method)
    layer = QKVParallelLinear(K, 64, 4, 2, bias=False, quant_config=config, prefix="l.qkv_proj")
    for part, stored in parts.items():
        load(layer, stored, part)
    check(finish(layer), torch.cat([stored.weight for stored in parts.values()]))
    head = ParallelLMHead(N, K, quant_config=config, prefix="lm_head")
    assert {name: held.dtype for name, held in head.named_parameters()} == {"weight": torch.float16}


def test_rules_of_auto_round() -> None:
    rules = {
        "l.special_proj": {"group_size": 32},
        "l.plain_proj": {"bits": 16},
        ".*three.*": {"bits": 3},
        "l.q_proj": {"bits": 16},
    }
    config = config_of(auto_round(awq(), symmetric=False, extra_config=rules, to_quant_block_names="l,m"))
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config, prefix="l.special_proj")
    stored = awq(32).store(drawn(N, K))
    load(layer, stored)
    check(finish(layer), stored.weight)
    for prefix in ("l.plain_proj", "visual.proj"):
        method = ReplicatedLinear(K, N, bias=False, quant_config=config, prefix=prefix).quant_method
        assert isinstance(method, UnquantizedLinearMethod)
    with pytest.raises(Refusal, match=r"^l.three_proj: AutoRound weights of 3 bits in AWQ packing do not run below"):
        ReplicatedLinear(K, N, bias=False, quant_config=config, prefix="l.three_proj")
    with pytest.raises(Refusal, match=r"^l.qkv_proj: .* parts of this merged layer differently"):
        QKVParallelLinear(K, 64, 4, 2, bias=False, quant_config=config, prefix="l.qkv_proj")


IGNORING = {
    "awq": (awq(), {"modules_to_not_convert": ["mtp", "gate_proj", "up_proj"]}),
    "fp8": (fp8(), {"modules_to_not_convert": ["mtp.o_proj", "l.gate_proj", "l.up_proj"]}),
    "fp8-ignored_layers": (fp8(), {"ignored_layers": ["mtp.o_proj", "l.gate_proj", "l.up_proj"]}),
    "packed": (packed(), {"ignore": ["lm_head", "re:.*mtp.*", "l.gate_proj", "l.up_proj"]}),
    "gptq": (gptq(), {"dynamic": {r"-:.*mtp.*": {}, r"-:.*gate_up.*": {}}}),
}


@pytest.mark.parametrize(("form", "rules"), IGNORING.values(), ids=IGNORING)
def test_layers_that_the_checkpoint_ignores_stay_unquantised(form: Format, rules: dict[str, Any]) -> None:
    found = config_of(form, **rules)
    method = ReplicatedLinear(K, N, bias=False, quant_config=found, prefix="mtp.o_proj").quant_method
    assert isinstance(method, UnquantizedLinearMethod)
    merged = MergedColumnParallelLinear(K, [N, N], bias=False, quant_config=found, prefix="l.gate_up_proj")
    assert isinstance(merged.quant_method, UnquantizedLinearMethod)
    method = ReplicatedLinear(K, N, bias=False, quant_config=found, prefix="model.layers.0.o_proj").quant_method
    assert isinstance(method, linear_method.QuantisedLinearMethod)


@pytest.mark.parametrize("name", ["visual", "model.visual", "model.visual.blocks.0.attn.proj"])
def test_fp8_lists_may_name_a_part_of_the_model(name: str) -> None:
    from vllm.model_executor.models.utils import WeightsMapper

    found = config_of(fp8(), modules_to_not_convert=[name])
    found.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.visual.": "visual."}))
    for prefix, left in (("visual.blocks.0.attn.proj", True), ("visuals.proj", False), ("l.visual.proj", False)):
        method = ReplicatedLinear(K, N, bias=False, quant_config=found, prefix=prefix).quant_method
        assert isinstance(method, UnquantizedLinearMethod) == left


PARTLY = {
    "awq": (awq(), {"modules_to_not_convert": ["q_proj"]}),
    "fp8": (fp8(), {"modules_to_not_convert": ["l.q_proj"]}),
    "packed": (packed(), {"ignore": ["l.q_proj"]}),
    "floats": (floats(), {"ignore": ["re:.*[.]v_proj"]}),
}


@pytest.mark.parametrize(("form", "rules"), PARTLY.values(), ids=PARTLY)
def test_merged_layers_that_are_quantised_in_part_are_refused(form: Format, rules: dict[str, Any]) -> None:
    with pytest.raises(
        Refusal, match=r"^l.qkv_proj: .* parts of this merged layer differently, .*; serve a checkpoint"
    ):
        QKVParallelLinear(K, 64, 4, 2, bias=False, quant_config=config_of(form, **rules), prefix="l.qkv_proj")


def test_an_unquantised_layer_whose_weights_are_quantised_is_refused() -> None:
    """vLLM applies this rule for up_proj to the merged layer, because its name ends so."""
    config = config_of(gptq(), dynamic={r"-:.*up_proj": {}})
    layer = MergedColumnParallelLinear(K, [N, N], bias=False, quant_config=config, prefix="l.gate_up_proj")
    assert isinstance(layer.quant_method, UnquantizedLinearMethod)
    load(layer, stored_as("gptq"), 0)
    load(layer, Stored({"weight": drawn(N, K).half()}, drawn(N, K)), 1)
    wanted = r"^l.gate_up_proj: this layer needs weight, but .* only 98304 of 196608 numbers, or quantises this layer"
    with pytest.raises(Refusal, match=wanted):
        finish(layer)


def unquantised() -> Any:
    config = config_of(awq(), modules_to_not_convert=["o_proj"])
    return ReplicatedLinear(K, N, bias=False, quant_config=config, prefix="l.o_proj")


def test_an_unquantised_layer_beside_quantised_ones() -> None:
    layer, weight = unquantised(), drawn(N, K).half()
    load(layer, Stored({"weight": weight.bfloat16()}, weight))
    check(finish(layer), weight.bfloat16())


@pytest.fixture
def zeros_in_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a reload. Memory that had other contents before may have NaN by chance."""
    monkeypatch.setattr(torch, "empty_strided", lambda size, stride, **named: torch.zeros(size, **named))


@pytest.mark.usefixtures("zeros_in_new_memory")
def test_an_unquantised_layer_must_be_complete_when_it_is_loaded_again() -> None:
    config = config_of(awq(), modules_to_not_convert=["gate_proj", "up_proj"])
    layer = MergedColumnParallelLinear(K, [N, N], bias=False, quant_config=config, prefix="l.gate_up_proj")
    record_metadata_for_reloading(layer)
    parts, again = ([drawn(N, K, seed).half() for seed in seeds] for seeds in ((0, 1), (2, 3)))

    def load_parts(weights: list[torch.Tensor]) -> None:
        for index, weight in enumerate(weights):
            load(layer, Stored({"weight": weight}, weight), index)

    load_parts(parts)
    check(finish(layer), torch.cat(parts))
    reload(layer, lambda: load_parts(again))
    check(layer, torch.cat(again))
    with pytest.raises(Refusal, match=r"^l.gate_up_proj: this layer needs weight, but .* only 98304 of 196608 numbers"):
        reload(layer, lambda: load_parts(parts[:1]))


def test_an_unquantised_layer_may_be_loaded_otherwise() -> None:
    """By a loader of the model, as in Mamba layers, or with dummy weights."""
    layer, weight = unquantised(), drawn(N, K).half()
    layer.weight.data.copy_(weight)
    check(finish(layer), weight)


def test_an_unquantised_layer_without_weights_is_refused() -> None:
    with pytest.raises(Refusal, match=r"^l.o_proj: this layer needs weight, but the checkpoint has none, or quantises"):
        finish(unquantised())


DTYPES = {
    "bytes of FP8": ("fp8", "weight", torch.uint8),
    "other FP8": ("floats-channel", "weight", torch.float8_e5m2),
    "weights that are not quantised": ("floats-channel", "weight", torch.bfloat16),
    "words as floats": ("awq", "qweight", torch.float32),
    "scales as integers": ("packed", "weight_scale", torch.int32),
    "scales as FP8": ("packed", "weight_scale", torch.float8_e4m3fn),
    "quantised weights of an unquantised layer": ("fp8", "weight", torch.float8_e4m3fn),
}


@pytest.mark.parametrize(("name", "tensor", "dtype"), DTYPES.values(), ids=DTYPES)
def test_tensors_of_another_dtype_are_refused(name: str, tensor: str, dtype: torch.dtype) -> None:
    stored = stored_as(name)
    given = stored.tensors[tensor]
    stored.tensors[tensor] = given.view(dtype) if dtype == torch.uint8 else given.float().to(dtype)
    rules = {"modules_to_not_convert": ["l.o_proj"]} if given.dtype == dtype else {}
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(FORMATS[name], **rules), prefix="l.o_proj")
    with pytest.raises(
        Refusal, match=rf"^l.o_proj: the checkpoint's {tensor} has dtype {dtype}, but .*; serve another"
    ):
        load(layer, stored)


@pytest.mark.parametrize("name", ["awq", "gptq", "packed-8-bits-channel"])
def test_scales_of_which_fp16_keeps_few_bits_are_refused(name: str) -> None:
    stored = stored_as(name)
    scales = next(tensor for tensor in stored.tensors if "scale" in tensor)
    stored.tensors[scales] = stored.tensors[scales].bfloat16() * 2**-14
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(FORMATS[name]), prefix="l.o_proj")
    with pytest.raises(
        Refusal, match=r"^l.o_proj: a scale is .*e-\d+, of which fp16 keeps at most four bits; use a check"
    ):
        load(layer, stored)


def test_a_rule_of_gptq_changes_bits_and_group_size() -> None:
    rules = {r"+:.*special.*": {"bits": 8, "group_size": 64, "sym": False}}
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(gptq(), dynamic=rules), prefix="l.special_proj")
    stored = FORMATS["gptq-8-bits-zero-points"].store(drawn(N, K))
    load(layer, stored)
    check(finish(layer), stored.weight)


@pytest.mark.parametrize("name", ["gptq-order", "floats-tensor"])
def test_a_compiled_layer_is_one_graph(name: str) -> None:
    stored = stored_as(name)
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(FORMATS[name]), prefix="l.o_proj")
    load(layer, stored)
    finish(layer)
    check(
        torch.compile(lambda x: layer.quant_method.apply(layer, x), fullgraph=True, backend="aot_eager"), stored.weight
    )


def test_the_parts_of_a_packed_matrix_are_freed() -> None:
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(awq()), prefix="l.o_proj")
    load(layer, stored_as("awq"))
    finish(layer)
    held = dict(layer.named_parameters())
    assert set(held) == {"qweight", "packed_scales"}, "LoRA looks for qweight"
    assert sum(one.numel() * one.element_size() for one in held.values()) < K * N * 0.55


@pytest.mark.parametrize("name", LOADED)
def test_each_missing_tensor_is_named(name: str) -> None:
    stored, config = stored_as(name), config_of(FORMATS[name])
    for lost in set(stored.tensors) - {"weight_shape", "input_scale", "g_idx" if "order" not in name else ""}:
        layer = ReplicatedLinear(K, N, bias=False, quant_config=config, prefix="model.layers.3.o_proj")
        load(layer, Stored({other: held for other, held in stored.tensors.items() if other != lost}, stored.weight))
        wanted = rf"^model.layers.3.o_proj: this layer needs {lost}, but the checkpoint has none, or leaves"
        with pytest.raises(Refusal, match=wanted):
            finish(layer)


@pytest.mark.parametrize("name", LOADED)
def test_a_missing_part_of_a_merged_layer_is_noticed(name: str) -> None:
    stored, config = stored_as(name), config_of(FORMATS[name])
    layer = MergedColumnParallelLinear(K, [N, N], bias=False, quant_config=config, prefix="l.gate_up_proj")
    load(layer, stored, 0)
    lost = next(other for other in stored.tensors if "scale" in other and other != "input_scale")
    load(layer, Stored({other: held for other, held in stored.tensors.items() if other != lost}, stored.weight), 1)
    wanted = rf"^l.gate_up_proj: this layer needs {lost}, but the checkpoint has only \d+ of \d+ numbers, or"
    with pytest.raises(Refusal, match=wanted):
        finish(layer)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("name", LOADED)
def test_each_misshapen_tensor_is_named(name: str, kind: Any) -> None:
    layer = kind(K, N, bias=False, quant_config=config_of(FORMATS[name]), prefix="model.layers.3.o_proj")
    held = dict(layer.named_parameters())
    for other, tensor in stored_as(name).tensors.items():
        for axis in range(tensor.dim() if other != "input_scale" else 0):
            wrong = [torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis)]
            wrong += [tensor.narrow(axis, 0, tensor.shape[axis] - 1)] if tensor.shape[axis] > 1 else []
            for misshapen in wrong:
                wanted = rf"^model.layers.3.o_proj: the checkpoint's {other} has shape \[\d+.*\] on each of 1 ranks\)"
                with pytest.raises(Refusal, match=wanted):
                    held[other].weight_loader(held[other], misshapen)


@pytest.mark.parametrize(
    ("kind", "shape"), [(parameters.BasevLLMParameter, (4, 3)), (parameters.PerTensorScaleParameter, (2,))]
)
def test_shapes_are_checked_without_vllms_assertions(kind: Any, shape: tuple[int, ...]) -> None:
    """As with ``python -O``: torch would repeat one number or row, and vLLM would take the first of several scales."""

    def load_without_checks(param: Any, loaded: torch.Tensor) -> None:
        param.data.copy_(loaded if kind is parameters.BasevLLMParameter else loaded[0])

    load = Loading("l.o_proj", "scale", 2).wrap(load_without_checks)
    param = kind(data=torch.zeros(shape), weight_loader=load)
    for wrong in (torch.ones(1), torch.ones(3)) if kind is parameters.BasevLLMParameter else (torch.ones(2),):
        with pytest.raises(Refusal, match=r"^l.o_proj: the checkpoint's scale has shape \[\d\], which does not fit"):
            load(param, wrong)


def test_other_groups_in_a_merged_layer_are_refused() -> None:
    form, one, other = FORMATS["gptq-order"], stored_as("gptq-order"), stored_as("gptq-order")
    other.tensors["g_idx"] = other.tensors["g_idx"].flip(0)
    layer = MergedColumnParallelLinear(K, [N, N], bias=False, quant_config=config_of(form), prefix="l.gate_up_proj")
    load(layer, one, 0)
    with pytest.raises(Refusal, match=r"^l.gate_up_proj: g_idx differs between the parts of this merged layer"):
        load(layer, other, 1)


def test_groups_of_other_sizes_are_refused() -> None:
    form, stored = FORMATS["gptq-order"], stored_as("gptq-order")
    stored.tensors["g_idx"] = torch.zeros_like(stored.tensors["g_idx"])
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(form), prefix="l.o_proj")
    load(layer, stored)
    with pytest.raises(Refusal, match=r"^l.o_proj: the groups in g_idx do not have 128 inputs each"):
        finish(layer)


def test_zero_points_of_symmetric_weights_are_refused() -> None:
    stored = stored_as("gptq-zero-points")
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(gptq()), prefix="l.o_proj")
    load(layer, stored)
    with pytest.raises(Refusal, match=r"^l.o_proj: the checkpoint says sym, but qzeros has other zero points"):
        finish(layer)


def test_zero_points_that_tools_read_differently_are_refused() -> None:
    stored = stored_as("gptq-zero-points")
    stored.tensors["qzeros"] = torch.full_like(stored.tensors["qzeros"], -1)
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(gptq(symmetric=False)), prefix="l.o_proj")
    load(layer, stored)
    with pytest.raises(
        Refusal, match=r"^l.o_proj: qzeros has 15, which some tools read as .* 16 .*; serve a checkpoint in"
    ):
        finish(layer)


def test_either_name_of_gptqs_format_is_read() -> None:
    stored, form = stored_as("gptq-second-zero-points"), FORMATS["gptq-second-zero-points"]
    section = {key: value for key, value in form.config.items() if key != "checkpoint_format"} | {"format": "gptq_v2"}
    config = config_of(Format(section, form.store))
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config, prefix="l.o_proj")
    load(layer, stored)
    check(finish(layer), stored.weight)
    with pytest.raises(Refusal, match=r"do not read zero points of the format gptq_v2"):
        config.get_quant_method(experts(), "l.mlp.experts")


# --- rules of compressed-tensors --------------------------------------------------------------------------------------


def rule_of_older_versions(layer_name: str, module: torch.nn.Module, targets: Any, fused_mapping: Any) -> str:
    """<= 0.23: the class of a merged layer goes before the names of its parts, of which the first counts. 0.19: an
    error for layers without a rule."""

    def first(name: str, contained: bool = False) -> str | None:
        for target in targets:
            if target.startswith("re:"):
                if re.match(target[3:], name):
                    return str(target)
            elif (target.lower() in name.lower()) if contained else target == name:
                return str(target)
        return None

    parent, _, last = layer_name.rpartition(".")
    parts = [first(f"{parent}.{part}") for part in fused_mapping.get(last, [])]
    found = first(layer_name) or first(type(module).__name__, True) or (parts[0] if parts and all(parts) else None)
    if found is None:
        raise ValueError(f"Unable to find matching target for {layer_name} in the compressed-tensors config.")
    return found


@pytest.fixture(params=["this version", "older versions"])
def rules_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "older versions":
        monkeypatch.setattr(compressed_tensors, "find_matched_target", rule_of_older_versions)


def grouped(**targets: Format) -> Any:
    """A checkpoint with a rule for each regular expression, in this order."""
    groups = {name: form.config["config_groups"]["group_0"] | {"targets": [name]} for name, form in targets.items()}
    return config_of(packed(), config_groups=groups)


def merged(config: Any, **parts: Stored) -> Any:
    layer = QKVParallelLinear(K, 64, 4, 2, bias=False, quant_config=config, prefix="l.qkv_proj")
    for part, stored in parts.items():
        load(layer, stored, part)
    return finish(layer)


def shifted(n: int, seed: int) -> torch.Tensor:
    return drawn(n, K, seed) + 0.05


@pytest.mark.usefixtures("rules_of")
def test_a_rule_for_all_parts_of_a_merged_layer_goes_before_that_of_linear_layers() -> None:
    form = packed(symmetric=False)
    config = grouped(**{"Linear": packed(), "re:.*[.][qkv]_proj$": form})
    parts = {part: form.store(shifted(n, n)) for part, n in {"q": 256, "k": 128, "v": 128}.items()}
    check(merged(config, **parts), torch.cat([stored.weight for stored in parts.values()]))


@pytest.mark.usefixtures("rules_of")
@pytest.mark.parametrize("first", ["q", "[kv]"])
def test_parts_of_a_merged_layer_with_other_rules_are_refused(first: str) -> None:
    forms = {"q": packed(symmetric=False), "[kv]": packed()}
    targets = {f"re:.*[.]{part}_proj$": forms[part] for part in (first, *(set(forms) - {first}))}
    with pytest.raises(
        Refusal, match=r"^l.qkv_proj: the checkpoint quantises the parts of this merged layer differently"
    ):
        merged(grouped(**targets))


@pytest.mark.usefixtures("rules_of")
@pytest.mark.parametrize("target", ["re:.*[.]q_proj$", "re:.*[.][qk]_proj$"])
def test_parts_of_a_merged_layer_without_a_rule_are_refused(target: str) -> None:
    with pytest.raises(Refusal, match=r"^l.qkv_proj: .*differently, or only some of them; serve a checkpoint"):
        merged(grouped(**{target: packed()}))


@pytest.mark.usefixtures("rules_of")
def test_a_rule_may_name_the_merged_layer() -> None:
    parts = {part: stored_as("packed", n) for part, n in {"q": 256, "k": 128, "v": 128}.items()}
    weight = torch.cat([stored.weight for stored in parts.values()])
    check(merged(grouped(**{"l.qkv_proj": packed()}), **parts), weight)


@pytest.mark.usefixtures("rules_of")
def test_a_layer_without_a_rule_is_unquantised() -> None:
    config = grouped(**{"re:.*language_model.*proj$": packed()})
    method = ReplicatedLinear(K, N, bias=False, quant_config=config, prefix="visual.blocks.0.attn.proj").quant_method
    assert isinstance(method, UnquantizedLinearMethod)


@pytest.mark.parametrize(("form", "lost"), [
    (packed(symmetric=False), "weight_zero_point"),
    (packed(ordered=True), "weight_g_idx"),
])  # fmt: skip
def test_tensors_that_the_checkpoint_does_not_describe_are_refused(form: Format, lost: str) -> None:
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(packed()), prefix="l.o_proj")
    with pytest.raises(
        Refusal, match=rf"^l.o_proj: the checkpoint has {lost}, but .* describes this layer without .*; serve"
    ):
        load(layer, form.store(drawn(N, K)))


@pytest.mark.parametrize("word", ["group", "dynamic"])
def test_both_words_for_activation_order(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.32 refuses them when it reads the checkpoint, so they are put in later."""
    form, config = packed(ordered=True), config_of(packed())
    weights = form.config["config_groups"]["group_0"]["weights"] | {"actorder": word}
    config.target_scheme_map["Linear"]["weights"] = QuantizationArgs.model_validate(weights)
    stored = form.store(drawn(N, K))
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config, prefix="l.o_proj")
    load(layer, stored)
    check(finish(layer), stored.weight)
    pretend(monkeypatch, 0, 2)
    with pytest.raises(Refusal, match=r"^l.down_proj: activation order .* divided among 2 ranks"):
        RowParallelLinear(K, N, bias=False, quant_config=config, prefix="l.down_proj")


def test_weights_in_another_order_are_not_loaded_again() -> None:
    """The loaded layer has no place for the order."""
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(gptq()), prefix="l.o_proj")
    record_metadata_for_reloading(layer)
    load(layer, stored_as("gptq"))
    finish(layer)
    ordered = stored_as("gptq-order")
    with pytest.raises(Refusal, match=r"^l.o_proj: .* have an activation order, but not both; start the server again"):
        reload(layer, lambda: load(layer, ordered))


def test_dummy_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_current_vllm_config().load_config, "load_format", "dummy")
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(awq()), prefix="l.o_proj")
    with pytest.raises(Refusal, match=r"^l.o_proj: --load-format dummy leaves quantised weights undefined; serve a"):
        finish(layer)


def test_bad_values_end_in_a_sentence_with_the_layers_name() -> None:
    stored = stored_as("awq")
    stored.tensors["scales"] = stored.tensors["scales"].clone().fill_diagonal_(float("inf"))
    layer = ReplicatedLinear(K, N, bias=False, quant_config=config_of(awq()), prefix="l.o_proj")
    with pytest.raises(Refusal, match=r"^l.o_proj: a scale is .* cannot hold, so the checkpoint is damaged"):
        load(layer, stored)


def test_a_shape_that_no_kernel_takes_is_refused_with_the_layers_name() -> None:
    with pytest.raises(Refusal, match=r"^l.o_proj: .*; use another --tensor-parallel-size or another checkpoint\.$"):
        ReplicatedLinear(K, N + 4, bias=False, quant_config=config_of(floats()), prefix="l.o_proj")


def test_a_group_that_ranks_divide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0, 2)
    with pytest.raises(
        Refusal, match=r"^l.down_proj: each rank has 192 of 384 inputs, .* group size 128; use a smaller"
    ):
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
    with pytest.raises(
        Refusal, match=r"^l.o_proj: compressed-tensors with .* does not run below .*; serve the model as"
    ):
        ReplicatedLinear(K, N, bias=False, quant_config=found, prefix="l.o_proj")


def experts() -> Any:
    """The layer of a mixture of experts, without what vLLM's constructor adds."""
    layer = compat.experts_class().__new__(compat.experts_class())
    torch.nn.Module.__init__(layer)
    layer.moe_config = SimpleNamespace(disable_inplace=False, is_act_and_mul=True)
    return layer


INTEGER_EXPERTS = {
    "awq": awq(),
    "awq-32": awq(32),
    "gptq": gptq(),
    "gptq-zero-points": gptq(symmetric=False),
    "gptq-8-bits": gptq(bits=8),
    "auto-round-awq": auto_round(awq(), symmetric=False),
    "auto-round-gptq": auto_round(gptq(symmetric=False), symmetric=False),
}
without_marlin = pytest.mark.skipif(
    not compat.has_integer_experts_without_marlin(), reason="vLLM 0.32 and newer may choose Marlin, and are refused"
)


@pytest.mark.parametrize("name", INTEGER_EXPERTS)
@pytest.mark.skipif(compat.has_integer_experts_without_marlin(), reason="this vLLM has no other kernels for them")
def test_a_vllm_that_may_choose_marlin_for_experts_is_refused(name: str) -> None:
    with pytest.raises(Refusal, match=r"^l.mlp.experts: this vLLM may run quantised experts with Marlin.* 0.19.1, or"):
        config_of(INTEGER_EXPERTS[name]).get_quant_method(experts(), "l.mlp.experts")


@without_marlin
@pytest.mark.parametrize("name", INTEGER_EXPERTS)
def test_integer_experts_are_loaded_for_vllms_own_kernels(name: str) -> None:
    """A layer as models build and load it. Its bytes are then read as those kernels read them: two numbers of 4 bits in
    a byte, the first in the low bits."""
    from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Method

    count, form = 3, INTEGER_EXPERTS[name]
    layer = built_experts(count, form, f"{name}.mlp.experts")
    method = layer.quant_method
    assert isinstance(method, MoeWNA16Method)
    meant = {}
    for expert in range(count):
        for shard, (n, k) in {"w1": (N, K), "w3": (N, K), "w2": (K, N)}.items():
            stored = form.store(drawn(n, k, seed=10 * expert + int(shard[1])))
            meant[expert, shard] = stored.weight
            for kind, tensor in stored.tensors.items():
                held_name = f"{'w2' if shard == 'w2' else 'w13'}_{kind}"
                held = getattr(layer, held_name)
                held.weight_loader(held, tensor.contiguous(), f"l.mlp.experts.{held_name}", shard, expert)
    bits, zero_points = method.quant_config.weight_bits, method.quant_config.has_zp
    for part in ("w13", "w2"):
        numbers = of_bytes(getattr(layer, f"{part}_qweight"), bits, axis=2)
        scales = getattr(layer, f"{part}_scales").float()
        zeros = of_bytes(getattr(layer, f"{part}_qzeros"), bits, axis=1) if zero_points else 1 << bits - 1
        groups = numbers.shape[2] // scales.shape[2]
        weight = (numbers - (zeros.repeat_interleave(groups, 2) if zero_points else zeros)).float()
        found = (weight * scales.repeat_interleave(groups, 2)).half()
        for expert in range(count):
            expected = [meant[expert, shard] for shard in (("w1", "w3") if part == "w13" else ("w2",))]
            assert torch.equal(found[expert], torch.cat(expected))


def built_experts(count: int, form: Format, prefix: str) -> Any:
    """The part of vLLM's layer that has the weights."""
    from vllm.model_executor.layers.fused_moe import FusedMoE

    built = FusedMoE(count, 2, K, N, torch.float16, quant_config=config_of(form), prefix=prefix)
    (layer,) = (one for one in built.modules() if "w13_qweight" in dict(one.named_parameters(recurse=False)))
    return layer


@without_marlin
@pytest.mark.parametrize(("shard", "name"), [("w1", "w13_qzeros"), ("w3", "w13_qzeros"), ("w2", "w2_qzeros")])
def test_zero_points_that_vllm_would_carry_into_another_column_are_refused(shard: str, name: str) -> None:
    form = gptq(symmetric=False)
    layer = built_experts(2, form, f"{shard}.mlp.experts")
    n, k = (K, N) if shard == "w2" else (N, K)
    words = form.store(drawn(n, k)).tensors["qzeros"].contiguous().clone()
    held = getattr(layer, name)
    words[0, 1] = words[0, 1] & ~(15 << 8) | 14 << 8
    held.weight_loader(held, words, f"l.mlp.experts.{name}", shard, 1)
    words[0, 1] |= 15 << 8
    with pytest.raises(Refusal, match=rf"^{shard}.mlp.experts: qzeros contains 15, a zero point of 16, .*; serve"):
        held.weight_loader(held, words, f"l.mlp.experts.{name}", shard, 1)


def of_bytes(held: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """int32 numbers from bytes."""
    if bits == 8:
        return held.to(torch.int32)
    return torch.stack([held & 15, held >> 4], dim=axis + 1).flatten(axis, axis + 1).to(torch.int32)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (gptq(ordered=True), "activation order"),
        (gptq(symmetric=False, second=True), "zero points of the format gptq_v2"),
        (gptq(bits=8, symmetric=False), r"zero points of 8 bits \(sym: false\)"),
        (gptq(group=-1), "scales per channel"),
        (awq(-1), "scales per channel"),
    ],
)
def test_experts_that_vllm_would_read_wrongly_are_refused(form: Format, said: str) -> None:
    with pytest.raises(Refusal, match=rf"^l.mlp.experts: .* do not read {said}.*; serve another checkpoint"):
        config_of(form).get_quant_method(experts(), "l.mlp.experts")


@pytest.mark.parametrize("rule", [r"+:.*experts\.\d+\.down_proj", r"-:.*experts\.0\.", r".*mlp\.experts"])
def test_rules_for_experts_are_refused(rule: str) -> None:
    with pytest.raises(
        Refusal, match=r"^l.mlp.experts: a rule of the checkpoint \(dynamic\) .*serve another checkpoint"
    ):
        config_of(gptq(), dynamic={rule: {"bits": 8}}).get_quant_method(experts(), "l.mlp.experts")


def test_rules_for_other_layers_leave_experts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq_module, "experts_method", lambda layer, *arguments, **named: layer)
    layer, rules = experts(), {r"-:.*mlp\.gate$": {}, r"+:.*o_proj": {"bits": 8}}
    assert config_of(gptq(), dynamic=rules).get_quant_method(layer, "l.mlp.experts") is layer


@pytest.mark.parametrize("name", ["packed", "floats-channel", "fp8-block"])
def test_other_quantised_experts_are_refused_by_name(name: str) -> None:
    with pytest.raises(
        Refusal, match=r"^model.layers.0.mlp.experts: quantised experts .* serve a GPTQ or AWQ checkpoint"
    ):
        config_of(FORMATS[name]).get_quant_method(experts(), "model.layers.0.mlp.experts")


@pytest.mark.parametrize(("name", "rules"), [
    ("awq", {"modules_to_not_convert": ["experts"]}),
    ("fp8", {"modules_to_not_convert": ["l.mlp.experts"]}),
    ("packed", {"ignore": ["re:.*experts.*"]}),
    ("gptq", {"dynamic": {r"-:.*experts.*": {}}}),
])  # fmt: skip
def test_unquantised_experts_beside_quantised_layers(
    name: str, rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "UnquantizedFusedMoEMethod", lambda moe: moe)
    layer = experts()
    assert config_of(FORMATS[name], **rules).get_quant_method(layer, "l.mlp.experts") is layer.moe_config


def pretend(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    """As if this process were one of several tensor parallel ranks."""
    for module in (layers, parameters, linear_method, embeddings, unquantised_method):
        for name, value in (("get_tensor_model_parallel_rank", rank), ("get_tensor_model_parallel_world_size", ranks)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda value=value: value)
