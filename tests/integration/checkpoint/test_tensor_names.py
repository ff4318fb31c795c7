"""A checkpoint that lacks one tensor is refused with the tensor's name; a whole one of any kind of model is not."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, PretrainedConfig

from fastattention_vllm.integration.checkpoint.tensor_names import FUSED, missing_tensor
from tests import reference_models as models
from tests.integration.engine import engine

MODELS = {
    "llama": models.llama(4, 2, 32),
    "qwen2": models.qwen2(4, 2, 32),
    "gemma2": models.gemma2(),
    "gemma3": models.gemma3(),
    "gemma3n": models.gemma3n(),
    "gpt_oss": models.gpt_oss(),
    "qwen3_moe": models.qwen3_moe(),
    "qwen3_next": models.qwen3_next(8),
    "qwen3_5": models.qwen3_5(8),
    "qwen3_5_moe": models.qwen3_5_moe(8),
    "mixtral": models.mixtral(),
    "phi3": models.phi3(),
    "bloom": models.bloom(),
    "opt": models.opt(),
}


def names_of(config: PretrainedConfig, folder: Path) -> list[str]:
    models.save_random(config, folder)
    names: list[str] = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names += file.keys()
    return names


@pytest.mark.parametrize("kind", MODELS)
def test_each_tensor_that_vllm_would_not_miss(kind: str, tmp_path: Path) -> None:
    """Without it, vLLM's own check finds nothing. All names of fused layers and experts are removed in turn."""
    config = MODELS[kind]
    names = names_of(config, tmp_path)
    assert missing_tensor(names, config) is None
    fused = [name for name in names if name.split(".")[-2] in {part for parts in FUSED for part in parts}]
    experts = [name for name in names if re.search(r"\bexperts\.\d+\.", name)]
    keys_left_out = kind == "gemma3n"
    for lacking in {*fused, *experts}:
        if keys_left_out and ".self_attn." in lacking:
            continue
        rest = [name for name in names if name != lacking]
        assert missing_tensor(rest, config) == lacking


def test_an_expert_that_one_layer_lacks() -> None:
    names = [f"model.layers.{n}.mlp.experts.{e}.{p}.weight" for n in (0, 1) for e in (0, 1, 2) for p in ("w1", "w2")]
    assert missing_tensor(names) is None
    rest = [name for name in names if "layers.1.mlp.experts.2" not in name]
    assert missing_tensor(rest) == "model.layers.1.mlp.experts.2.w1.weight"


@pytest.mark.parametrize(
    "names",
    [
        ["layers.0.self_attn.q_proj.bias", "layers.1.self_attn.q_proj.bias"],  # of queries alone, in each layer
        ["layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.qweight"],
        ["layers.0.attn.k_proj.k_scale", "layers.0.attn.v_proj.v_scale", "layers.1.attn.k_proj.k_scale"],
        ["layers.0.attn.qkv_proj.weight", "layers.1.attn.q_proj.weight"],
        ["visual.blocks.0.attn.q.weight", "lm_head.weight"],
    ],
)
def test_layers_that_differ_on_purpose(names: list[str]) -> None:
    assert missing_tensor(names) is None


def test_keys_that_a_configuration_leaves_out() -> None:
    parts = ("q_proj", "k_proj", "v_proj")
    names = [f"layers.{n}.self_attn.{part}.weight" for n in (0, 1) for part in parts]
    names.remove("layers.1.self_attn.v_proj.weight")
    assert missing_tensor(names) == "layers.1.self_attn.v_proj.weight"
    assert missing_tensor(names, SimpleNamespace(attention_k_eq_v=True)) is None
    assert missing_tensor(names, SimpleNamespace(num_kv_shared_layers=1)) is None
    assert missing_tensor(names, SimpleNamespace(num_kv_shared_layers=0)) is not None


def test_layers_with_latent_attention_beside_others_have_queries_alone() -> None:
    """Kimi-Linear: the same parent has keys and values in other layers."""
    names = [f"layers.{n}.self_attn.{part}.weight" for n in (0, 1) for part in ("q_proj", "k_proj", "v_proj")]
    names += [f"layers.2.self_attn.{part}.weight" for part in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj")]
    assert missing_tensor(names) is None
    assert missing_tensor([*names[:-3], names[-3]]) == "layers.2.self_attn.k_proj.weight"


def test_layers_that_attend_to_the_keys_of_others() -> None:
    """HunYuan with cross-layer attention."""
    names = [f"layers.{n}.self_attn.{part}.weight" for n in (0, 2) for part in ("q_proj", "k_proj", "v_proj")]
    names += [f"layers.{n}.self_attn.q_proj.weight" for n in (1, 3)]
    assert missing_tensor(names, SimpleNamespace(use_cla=True, cla_share_factor=2)) is None
    assert missing_tensor(names, SimpleNamespace(use_cla=False, cla_share_factor=2)) is not None


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def quantised(layers: int = 5, parts: tuple[str, ...] = ATTENTION) -> list[str]:
    """The names of a model in AWQ, of which vLLM counts nothing."""
    tensors = [f"self_attn.{part}.{kind}" for part in parts for kind in ("qweight", "qzeros", "scales")]
    tensors += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    return [f"model.layers.{n}.{tensor}" for n in range(layers) for tensor in tensors] + ["model.norm.weight"]


@pytest.mark.parametrize(
    "lacking",
    [
        "model.layers.0.self_attn.o_proj.scales",
        "model.layers.4.self_attn.o_proj.qweight",
        "model.layers.2.input_layernorm.weight",
        "model.layers.2.self_attn.o_proj",
        "model.layers.2.self_attn.q_proj|model.layers.2.self_attn.k_proj|model.layers.2.self_attn.v_proj",
    ],
)
def test_what_one_layer_of_a_quantised_model_lacks(lacking: str) -> None:
    names = quantised()
    assert missing_tensor(names) is None
    found = missing_tensor([name for name in names if not name.startswith(tuple(lacking.split("|")))])
    assert found is not None
    assert found.startswith(tuple(lacking.split("|")))


def test_a_fused_projection_that_one_layer_lacks() -> None:
    names = quantised(parts=("qkv_proj", "o_proj"))
    assert missing_tensor([name for name in names if not name.startswith("model.layers.1.self_attn.qkv_proj")])


@pytest.mark.parametrize(
    "names",
    [
        # The first and the last layers of some models have no norm.
        [name for name in quantised() if name != "model.layers.0.input_layernorm.weight"],
        [name for name in quantised() if name != "model.layers.4.post_attention_layernorm.weight"],
        # A layer without attention, two layers without a norm, and too few layers to tell.
        [name for name in quantised() if not name.startswith("model.layers.2.self_attn")],
        [name for name in quantised() if name[13:] not in ("1.input_layernorm.weight", "2.input_layernorm.weight")],
        [name for name in quantised(3) if name != "model.layers.1.input_layernorm.weight"],
        # A layer that is not quantised, as the first one of many, and one in another format.
        [f"layers.{n}.mlp.down_proj.{p}" for n in range(5) for p in ("weight", "weight_scale")[: 1 if n == 2 else 2]],
        [
            f"layers.{n}.mlp.down_proj.{p}"
            for n in range(5)
            for p in ("weight", "weight.absmax", "weight.quant_map")[: 1 if n == 2 else 3]
        ],
        [
            f"layers.{n}.mlp.down_proj.{p}"
            for n in range(5)
            for p in ("weight", "weight_scale", "weight_scale_2")[: 2 if n == 2 else 3]
        ],
        # Scales of the KV cache, which vLLM replaces.
        [*quantised(), *(f"model.layers.{n}.self_attn.k_proj.k_scale" for n in (0, 1, 3, 4))],
    ],
)
def test_quantised_layers_that_differ_on_purpose(names: list[str]) -> None:
    assert missing_tensor(names) is None


def test_parts_that_a_configuration_chooses_by_layer() -> None:
    """Nemotron-NAS leaves out attention or the MLP of any layer."""
    names = [name for name in quantised() if name != "model.layers.2.input_layernorm.weight"]
    assert missing_tensor(names, SimpleNamespace(block_configs=[{"attention": {"no_op": True}}])) is None
    assert missing_tensor(names, SimpleNamespace(block_configs=None)) is not None


FAMILIES = (
    "afmoe bamba bart bert clip cohere2 ernie4_5_moe falcon falcon_h1 gemma3_text gemma4_text glm4_moe gpt2 gpt_neox "
    "gpt_oss granitemoehybrid jamba lfm2 minimax mllama modernbert nemotron_h olmo_hybrid olmo2 opt phi3 qwen2_5_vl "
    "qwen3 qwen3_next recurrent_gemma siglip smollm3 t5 whisper zamba2"
).split()


@pytest.mark.more
@pytest.mark.parametrize("kind", FAMILIES)
def test_no_family_of_transformers_is_refused(kind: str) -> None:
    """With as many layers as its configuration has by default, and also in AWQ. All families were tried once."""
    try:
        config = AutoConfig.for_model(kind)
    except ValueError:
        pytest.skip("this transformers does not know it")
    with torch.device("meta"):
        names = list(AutoModel.from_config(config).state_dict())
    in_awq = [
        name.removesuffix("weight") + kind
        for name in names
        for kind in (("qweight", "qzeros", "scales") if name.endswith("_proj.weight") else ("weight",))
        if name.endswith("weight")
    ]
    assert len(names) > 20
    assert missing_tensor(names, config.get_text_config()) is None
    assert missing_tensor(in_awq, config.get_text_config()) is None


def test_the_names_are_those_of_vllms_models() -> None:
    """Each list of names must be one of vLLM's, and each that several of vLLM's models use must be known."""
    theirs = list(packed())
    assert set(FUSED) <= set(theirs)
    common = {names for names in theirs if theirs.count(names) > 3}
    assert common <= set(FUSED)


def packed() -> Iterator[tuple[str, ...]]:
    """The names that become one parameter, in the sources of vLLM's models."""
    for path in (Path(vllm.__file__).parent / "model_executor" / "models").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "packed_modules_mapping"
            if named and isinstance(node.value, ast.Dict):
                for value in node.value.values:
                    if isinstance(value, ast.List) and len(value.elts) > 1:
                        yield tuple(element.value for element in value.elts if isinstance(element, ast.Constant))


def test_an_engine_does_not_start_without_a_key_projection(tmp_path: Path) -> None:
    """vLLM's own check lets it pass, and its answers change with what memory held before."""
    path = models.save_random(models.llama(4, 2, 32, 2), tmp_path / "model")
    lacking = "model.layers.1.self_attn.k_proj.weight"
    tensors = load_file(path / "model.safetensors")
    del tensors[lacking]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(f"lack the tensor {lacking}, which other")), engine(path):
        pass
    shutil.rmtree(path)
