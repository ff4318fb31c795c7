"""Bytes of weights, from quantization_config in the forms that the tools write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastattention_vllm.plan.memory import Request, weight_bytes
from fastattention_vllm.plan.model import ModelShape, shape_of
from fastattention_vllm.plan.weights import PLAIN, stored
from tests.plan.shapes import FOLDER

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
NAMES = ("model.layers.0.self_attn.q_proj",)

# Numbers in the matrices of Qwen3.5-27B: hidden size 5120, 48 linear-attention layers and 16 others.
MLP = 3 * 5120 * 17408
QUERIES, KEYS, OUTPUT = 5120 * 2 * 24 * 256, 5120 * 4 * 256, 24 * 256 * 5120
ATTENTION = QUERIES + 2 * KEYS + OUTPUT
GATES, CONVOLUTION = 2 * 5120 * 48, 4 * 10240
LINEAR = 5120 * 10240 + 5120 * 6144 + 6144 * 5120
"""Without gates and convolution."""
ENDS = 2 * 248320 * 5120
"""Embeddings and the matrix of logits."""
INT4_BYTES = 0.5 + 4 / 128


def compressed(weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"], **others}


def model(name: str, quantisation: dict[str, Any]) -> ModelShape:
    config = json.loads((FOLDER / name / "config.json").read_text())
    return shape_of(config | {"quantization_config": quantisation}, "here")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AWQ, INT4_BYTES),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "modules_to_not_convert": ["visual"]}, 0.5 + 4 / 64),
        (AWQ | {"modules_to_not_convert": ["layers.0"]}, 2),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False}, 1 + 4 / 32),
        (GPTQ | {"group_size": -1}, 0.5),
        (GPTQ | {"dynamic": {"-:.*attn.*": {}}}, 2),
        (GPTQ | {"dynamic": {"-:attn": {}}}, INT4_BYTES),  # rules match from the beginning
        (GPTQ | {"dynamic": {"+:.*q_proj": {"bits": 8, "group_size": 32}, "-:.*": {}}}, 1 + 4 / 32),
        (GPTQ | {"dynamic": {r".*\.0\.": {"bits": 8}}}, 1 + 4 / 128),
        (GPTQ | {"modules_in_block_to_quantize": [["self_attn.k_proj"], ["mlp.up_proj"]]}, 2),
        (GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, INT4_BYTES),
        (compressed(INT4), INT4_BYTES),
        (compressed({"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None}), 1),
        (compressed({"num_bits": 8, "type": "float", "strategy": "tensor"}), 1),
        (compressed(INT4, ignore=["re:.*visual.*", "lm_head"]), INT4_BYTES),
        (compressed(INT4, ignore=["re:.*(mtp|self_attn).*"]), 2),
        (compressed(INT4, ignore=["self_attn"]), INT4_BYTES),
        (compressed(INT4, config_groups={}), 2),
        (compressed(INT4, config_groups={"group_0": {"targets": ["re:.*mlp.*"], "weights": INT4}}), 2),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": None}, 1),
        ({"quant_method": "fp8", "ignored_layers": ["model.layers.0.self_attn.q_proj"]}, 2),
        ({"quant_method": "fp8", "ignored_layers": ["model.layers.0.self_attn.qkv_proj"]}, 2),
        ({"quant_method": "fp8", "ignored_layers": ["model.layers.0"]}, 2),
        ({"quant_method": "fp8", "ignored_layers": ["self_attn.q_proj"]}, 2),
        ({"quant_method": "fp8", "ignored_layers": ["model.layers.1", "layers", "proj", "mtp.layers.0"]}, 1),
        # What the planner does not know.
        (GPTQ | {"bits": 3}, None),
        (GPTQ | {"dynamic": {"-:(": {}}}, None),
        (compressed({"num_bits": 4, "type": "float", "group_size": 16}), None),
        ({"quant_method": "bitsandbytes"}, None),
        ({}, None),
    ],
)
def test_formats(config: dict[str, Any], expected: float | None) -> None:
    merged = [name.replace("q_proj", "qkv_proj") for name in NAMES]
    assert stored(config, NAMES, merged).bytes == expected


@pytest.mark.parametrize("method", [AWQ, GPTQ])
def test_the_matrix_of_logits_is_quantised_if_the_checkpoint_says_so(method: dict[str, Any]) -> None:
    assert stored(method, ["lm_head"], is_head=True) is PLAIN
    assert stored(method | {"lm_head": True}, ["lm_head"], is_head=True).bytes == INT4_BYTES


def test_linear_layers_do_not_include_the_matrix_of_logits() -> None:
    assert stored(compressed(INT4, ignore=[]), ["lm_head"], is_head=True) is PLAIN
    named = {"group_0": {"targets": ["re:.*lm_head"], "weights": INT4}}
    assert stored(compressed(INT4, ignore=[], config_groups=named), ["lm_head"], is_head=True).bytes == INT4_BYTES


LLAMA_ATTENTION, LLAMA_MLP, LLAMA_END = 4096 * (2 * 4096 + 2 * 1024), 3 * 4096 * 14336, 128256 * 4096


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AWQ, INT4_BYTES * 32 * (LLAMA_ATTENTION + LLAMA_MLP) + 4 * LLAMA_END),
        (GPTQ | {"lm_head": True}, INT4_BYTES * (32 * (LLAMA_ATTENTION + LLAMA_MLP) + LLAMA_END) + 2 * LLAMA_END),
        (GPTQ | {"dynamic": {"-:.*attn.*": {}}}, 32 * (2 * LLAMA_ATTENTION + INT4_BYTES * LLAMA_MLP) + 4 * LLAMA_END),
        (
            compressed(INT4, ignore=["lm_head", *(f"model.layers.{index}.mlp.down_proj" for index in (0, 31))]),
            INT4_BYTES * (32 * (LLAMA_ATTENTION + LLAMA_MLP) - 2 * 4096 * 14336) + 2 * 2 * 4096 * 14336 + 4 * LLAMA_END,
        ),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.7"]},
            33 * (LLAMA_ATTENTION + LLAMA_MLP) + 4 * LLAMA_END,
        ),
    ],
)
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_llama_counted_by_hand(config: dict[str, Any], expected: float, ranks: int) -> None:
    assert weight_bytes(model("llama3-8b", config), Request(4096), ranks) == int(expected / ranks)


def listed(*names: str) -> list[str]:
    return [f"model.language_model.layers.{index}.linear_attn.{name}" for index in range(64) for name in names]


GROUPS = {
    "attention": {"targets": ["re:.*attn.*"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
    "others": {"targets": ["Linear"], "weights": INT4},
}
PLAIN_ENDS = 2 * (48 * CONVOLUTION + ENDS)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Everything but the convolutions, which are no linear layers.
        (compressed(INT4), INT4_BYTES * (64 * MLP + 16 * ATTENTION + 48 * (LINEAR + GATES)) + PLAIN_ENDS),
        (
            compressed(INT4, ignore=["re:.*(mtp|self_attn|linear_attn).*", "re:.*visual.*", "lm_head"]),
            INT4_BYTES * 64 * MLP + 2 * (16 * ATTENTION + 48 * (LINEAR + GATES)) + PLAIN_ENDS,
        ),
        (
            compressed(INT4, ignore=["re:.*lm_head|.*mtp.*|.*in_proj_[ab]$"]),
            INT4_BYTES * (64 * MLP + 16 * ATTENTION + 48 * LINEAR) + 2 * 48 * GATES + PLAIN_ENDS,
        ),
        (
            compressed(INT4, config_groups=GROUPS),
            INT4_BYTES * 64 * MLP + 16 * ATTENTION + 48 * (LINEAR + GATES) + PLAIN_ENDS,
        ),
        (
            GPTQ | {"dynamic": {"-:.*attn.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {}}},
            INT4_BYTES * 64 * MLP + 2 * (16 * ATTENTION + 48 * (LINEAR + GATES)) + PLAIN_ENDS,
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [
                "lm_head", "model.language_model.embed_tokens", "model.visual.blocks.0.attn.proj", "mtp.fc",
                *listed("conv1d", "in_proj_a", "in_proj_b"),
            ]},
            64 * MLP + 16 * ATTENTION + 48 * (LINEAR + 2 * GATES) + PLAIN_ENDS,
        ),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["linear_attn.in_proj_a", "linear_attn.in_proj_b"]},
            64 * MLP + 16 * ATTENTION + 48 * (LINEAR + 2 * GATES) + PLAIN_ENDS,
        ),
        (
            AWQ | {"modules_to_not_convert": ["linear_attn", "visual"]},
            INT4_BYTES * (64 * MLP + 16 * ATTENTION) + 2 * 48 * (LINEAR + GATES) + PLAIN_ENDS,
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_hybrid_counted_by_hand(config: dict[str, Any], expected: float, ranks: int) -> None:
    assert weight_bytes(model("qwen3.5-27b", config), Request(4096), ranks) == int(expected / ranks)


def test_every_architectures_names_are_known() -> None:
    """Matrices of architectures with other names than Llama's."""
    config = json.loads((FOLDER / "llama2-7b" / "config.json").read_text())
    for architecture, rule, left in (
        ("Phi3ForCausalLM", "model.layers.3.self_attn.qkv_proj", 3 * 4096 * 4096),
        ("Phi3ForCausalLM", r"re:.*\.3\.mlp\.gate_up_proj", 2 * 4096 * 11008),
        ("GPTNeoXForCausalLM", "gpt_neox.layers.3.attention.query_key_value", 3 * 4096 * 4096),
        ("GPTNeoXForCausalLM", r"re:.*\.3\.mlp\.dense_4h_to_h", 4096 * 11008),
    ):
        fp8 = compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, ignore=[rule])
        found = shape_of(config | {"architectures": [architecture], "quantization_config": fp8}, "here")
        assert found.weight_bytes() == found.parameters() + 2 * found.head_parameters() + left
