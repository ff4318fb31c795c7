"""Models and weights that the engine refuses at start on a device. tests/integration/test_printed_commands.py and
tests/integration/cuda/quantised/test_planner.py ask both.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastattention_vllm.attention.cpu.kernels import HEAD_SIZE_MULTIPLE
from fastattention_vllm.attention.volta.launch import HEAD_SIZES
from fastattention_vllm.plan import refused
from fastattention_vllm.plan.errors import PlanError
from fastattention_vllm.plan.hardware import machine, tables
from fastattention_vllm.plan.model import ModelShape, shape_of
from tests.plan.shapes import FOLDER, NAMES, shape

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
ORDERED = GPTQ | {"desc_act": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": INT8, "input_activations": {"num_bits": 8, "dynamic": True}}
    },
}
INSTEAD = (
    "serve the model as an AWQ, GPTQ (4 or 8 bits), compressed-tensors (int4, int8 or FP8 weights) or FP8 checkpoint"
)


def model(quantisation: dict[str, Any], name: str = "llama3-8b") -> ModelShape:
    config = json.loads((FOLDER / name / "config.json").read_text())
    return shape_of(config | {"quantization_config": quantisation}, "here")


@pytest.mark.parametrize(
    ("config", "ranks", "said"),
    [
        (
            AWQ | {"version": "gemv"},
            1,
            [
                "model.layers.0.self_attn.qkv_proj has AWQ weights of 4 bits with zero points in the version 'gemv', "
                "which the engine refuses at start on NVIDIA V100 SXM2 32 GB: the kernels read 4 bits with zero points "
                f"in the version 'gemm'; {INSTEAD}, or unquantised in float16."
            ],
        ),
        (W8A8, 1, ["with activations of 8 bits, which", f": the kernels multiply by activations in fp16; {INSTEAD}"]),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            1,
            ["FP8 weights in blocks of [64, 64], which", ": the kernels read [128, 128] and scales per tensor; serve"],
        ),
        (
            ORDERED,
            4,
            [
                "model.layers.0.self_attn.o_proj has activation order (desc_act), which",
                ": 4 ranks divide the inputs of this layer; use --tp 1, or a checkpoint with desc_act: false.",
            ],
        ),
        ({"quant_method": "mxfp4"}, 1, ["'mxfp4', which", ": vLLM's kernels for them need compute capability 8.0;"]),
        (AWQ | {"group_size": 48}, 1, ["groups of 48 inputs, which", "; use a checkpoint with groups of 128."]),
        (AWQ | {"group_size": 1024}, 8, ["o_proj has groups of 1024 inputs, which", "each of 8 ranks has 512 inputs"]),
        (
            GPTQ | {"dynamic": {r"-:.*\.[qkv]_proj": {}}},
            1,
            ["a rule for single matrices (dynamic)", "vLLM merges them"],
        ),
    ],
)
def test_a_refusal_is_one_sentence(config: dict[str, Any], ranks: int, said: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        refused.check(model(config), machine("v100-32g", ranks))
    assert all(part in str(error.value) for part in said)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)
    for other in ("t4-16g", "a100-80g", "ascend-910b-64g"):
        refused.check(model(config), machine(other, ranks))


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        (AWQ, 8),
        (ORDERED, 1),
        (ORDERED | {"group_size": -1}, 4),
        (ORDERED | {"dynamic": {"-:.*o_proj": {}, "-:.*down_proj": {}}}, 4),
        (GPTQ | {"bits": 3}, 1),  # runs on vLLM's own kernels
        ({"quant_method": "bitsandbytes"}, 1),
    ],
)
def test_what_runs(config: dict[str, Any], ranks: int) -> None:
    refused.check(model(config), machine("v100-32g", ranks))


def gemma(architecture: str, **entries: Any) -> ModelShape:
    config = json.loads((FOLDER / "llama3-8b" / "config.json").read_text())
    return shape_of(config | {"architectures": [architecture]} | entries, "here")


@pytest.mark.parametrize("name", ["v100-16g", "v100-pcie-32g", "t4-16g", "rtx2080ti-11g"])
@pytest.mark.parametrize("architecture", refused.UNSTABLE_IN_FLOAT16)
def test_models_that_overflow_in_float16_need_bfloat16(architecture: str, name: str) -> None:
    """Devices without bfloat16 refuse them, also if config.json names another dtype."""
    device = machine(name, 1)
    for dtype in ("bfloat16", "float16", "float32"):
        with pytest.raises(PlanError) as error:
            refused.check(gemma(architecture, torch_dtype=dtype), device)
        assert str(error.value) == (
            f"model type {refused.UNSTABLE_IN_FLOAT16[architecture]!r} does not run in float16, because it is "
            f"numerically unstable there, and {device.device.name} has no bfloat16; plan a model that runs in float16 "
            "(Llama, Qwen2.5, Qwen3, Mistral), or a device with bfloat16."
        )
        assert refused.serving_dtype(gemma(architecture, torch_dtype=dtype), machine("a100-80g", 1)) == "bfloat16"


@pytest.mark.parametrize(
    ("stored", "name", "served"),
    [("float32", "a100-80g", "float16"), ("bfloat16", "a100-80g", "bfloat16"), ("bfloat16", "v100-32g", "float16")],
)
def test_the_dtype_of_other_models(stored: str, name: str, served: str) -> None:
    assert refused.serving_dtype(gemma("LlamaForCausalLM", torch_dtype=stored), machine(name, 1)) == served


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("gemma")])
def test_unquantised_models_run(name: str) -> None:
    refused.check(shape(name), machine("v100-32g", 8))


@pytest.mark.parametrize(
    ("name", "device", "entries", "said"),
    [
        (
            "llama2-7b",
            "v100-32g",
            {"head_dim": 160},
            "this model's head size of 160 is not supported by this project's V100 kernels on NVIDIA V100 SXM2 32 GB: "
            "it must be one of 64, 80, 96, 112, 128, 192, 256; plan another model or device.",
        ),
        ("llama2-7b", "t4-16g", {"head_dim": 72}, "this project's Turing kernels on NVIDIA T4: it must be one of 64"),
        ("llama2-7b", "a100-80g", {"head_dim": 132}, "head size of 132 is not supported by vLLM's FlashAttention on"),
        (
            "llama2-7b",
            "ascend-910b-64g",
            {"head_dim": 72},
            "Huawei Ascend 910B 64 GB: it must be a multiple of 16; plan",
        ),
        ("gemma2-9b", "ascend-910b-64g", {}, "this model's soft cap of 50 (attn_logit_softcapping) is not supported"),
        ("gemma3-4b", "ascend-910b-64g", {}, "in both directions, is not supported by torch_npu's"),
    ],
)
def test_models_that_the_kernels_do_not_compute(name: str, device: str, entries: dict[str, Any], said: str) -> None:
    config = json.loads((FOLDER / name / "config.json").read_text())
    with pytest.raises(PlanError) as error:
        refused.check(shape_of(config | entries, "here"), machine(device, 1))
    assert said in str(error.value)
    assert str(error.value).endswith("; plan another model or device.")
    refused.check(shape_of(config, "here"), machine("h100-80g", 1))


def test_the_head_sizes_are_the_kernels() -> None:
    kernels = tables().kernels
    assert kernels["volta"].head_sizes == kernels["turing"].head_sizes == HEAD_SIZES
    assert kernels["flash"].head_sizes == HEAD_SIZE_MULTIPLE


def test_heads_of_linear_attention_are_few() -> None:
    """48 outputs of b and of a: 12 on each of 4 ranks, which is no multiple of the 8 numbers in a word."""
    refused.check(model(AWQ, "qwen3.5-27b"), machine("v100-32g", 2))
    with pytest.raises(PlanError, match=r"in_proj_ba has a part of 12 outputs on each rank, .*; use a smaller --tp\."):
        refused.check(model(AWQ, "qwen3.5-27b"), machine("v100-32g", 4))
    left = AWQ | {"modules_to_not_convert": ["in_proj_a", "in_proj_b"]}
    refused.check(model(left, "qwen3.5-27b"), machine("v100-32g", 4))


def test_part_of_a_merged_layer() -> None:
    listed = {"quant_method": "fp8", "modules_to_not_convert": ["linear_attn.in_proj_a"]}
    with pytest.raises(PlanError, match=r"in_proj_ba has parts of different formats \(in_proj_b and in_proj_a\)"):
        refused.check(model(listed, "qwen3.5-27b"), machine("v100-32g", 1))
