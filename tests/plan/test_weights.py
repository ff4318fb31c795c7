"""Bytes of a weight, from quantization_config in the forms that the tools write."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastattention_vllm.plan.memory import Request, weight_bytes
from fastattention_vllm.plan.weights import bytes_per_weight
from tests.plan.shapes import shape

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def compressed(weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"], **others}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 0.5 + 4 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "modules_to_not_convert": ["visual"]}, 0.5 + 4 / 64),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False}, 1 + 4 / 32),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 0.5),
        (compressed(INT4), 0.5 + 4 / 128),
        (compressed({"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None}), 1),
        (compressed({"num_bits": 8, "type": "float", "strategy": "tensor"}), 1),
        (compressed(INT4, ignore=["re:.*visual.*", "lm_head"]), 0.5 + 4 / 128),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": None}, 1),
        # What the planner does not know.
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, None),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}, None),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*mlp.*": {}}}, None),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["layers.0"]}, None),
        ({"quant_method": "fp8", "ignored_layers": ["model.layers.0.mlp.down_proj"]}, None),
        (compressed(INT4, ignore=["re:.*linear_attn.*"]), None),
        (compressed({"num_bits": 4, "type": "float", "group_size": 16}), None),
        (compressed(INT4, config_groups={}), None),
        ({"quant_method": "bitsandbytes"}, None),
        ({}, None),
    ],
)
def test_formats(config: dict[str, Any], expected: float | None) -> None:
    assert bytes_per_weight(config) == expected


def test_embeddings_and_the_matrix_of_logits_stay_in_fp16() -> None:
    model = dataclasses.replace(shape("llama3-8b"), quantisation="awq", matrix_bytes=0.53125)
    of_layers = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert weight_bytes(model, Request(4096), 1) == int(0.53125 * of_layers) + 2 * 2 * 128256 * 4096
