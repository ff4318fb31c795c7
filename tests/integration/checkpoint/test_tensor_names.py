"""A checkpoint that lacks one tensor is refused with the tensor's name; a whole one of any kind of model is not."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

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
    with pytest.raises(ValueError, match=re.escape(f"lack the tensor {lacking}, although")), engine(path):
        pass
    shutil.rmtree(path)
