"""config.json becomes a shape, or one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma2Config, Gemma3TextConfig

from fastattention_vllm.plan.errors import PlanError
from fastattention_vllm.plan.model import GEMMA3_DEFAULTS, SOFT_CAPS, read, shape_of
from tests.plan.shapes import FOLDER, NAMES, shape

PUBLISHED = {
    "llama2-7b": 6.738e9,
    "llama2-70b": 68.98e9,
    "llama3-8b": 8.030e9,
    "qwen3-32b": 32.76e9,
    "qwen3.5-27b": 26.896e9,  # the language model, as transformers counts it
    "pangu-38b": 38e9,
    "pangu-71b": 71e9,
    # The language models, as transformers counts them.
    "gemma2-9b": 9.242e9,
    "gemma3-4b": 3.880e9,
    "gemma3-27b": 27.009e9,
    "mistral-small-3.1-24b": 23.572e9,
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


def changed(**entries: Any) -> dict[str, Any]:
    return {key: value for key, value in {**LLAMA, **entries}.items() if value is not ...}


@pytest.mark.parametrize("name", NAMES)
def test_the_parameters_are_as_published(name: str) -> None:
    inferred = name.startswith("pangu")
    parameters = shape(name).parameters()
    # The two PanGu models are chosen by their size without embeddings.
    assert parameters == pytest.approx(PUBLISHED[name], rel=0.04 if inferred else 0.001)


@pytest.mark.parametrize("name", NAMES)
def test_every_shape_has_a_source(name: str) -> None:
    source = json.loads((FOLDER / name / "config.json").read_text())["source"]
    assert ("inferred" in source) == name.startswith("pangu")


def test_inferred_shapes_follow_twelve_l_h_squared() -> None:
    for name in ("pangu-38b", "pangu-71b"):
        found = shape(name)
        layers = found.num_layers * found.layer_parameters()
        assert layers == 12 * found.num_layers * found.hidden_size**2
        assert found.num_heads == found.num_kv_heads


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_share_the_parameters(ranks: int) -> None:
    found = shape("llama2-70b")
    assert found.parameters(ranks) * ranks == found.parameters()


def test_more_ranks_than_kv_heads_keep_copies() -> None:
    found = shape_of(LLAMA, "here")
    assert found.kv_heads_per_rank(2) == found.kv_heads_per_rank(8) == 1
    copied = 2 * found.hidden_size * found.head_size * found.num_layers
    assert found.parameters(4) * 4 - found.parameters() == 2 * copied


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_hybrid_has_two_kinds_of_layers(ranks: int) -> None:
    found = shape("qwen3.5-27b")
    assert found.full_layers == tuple(range(3, 64, 4))
    assert found.kv_layers == 16
    assert found.linear is not None
    # 48 matrices of 128 x 128 in fp32, and 3 inputs of 10240 channels in 16 bits: 3 207 168 bytes.
    assert found.linear.state_bytes(ranks) * ranks == 48 * 128 * 128 * 4 + 3 * 10240 * 2
    assert found.parameters(ranks) * ranks == found.parameters()
    with pytest.raises(PlanError, match="possible values: 1, 2, 4, 8"):
        found.check_ranks(3)


def test_layer_types_follow_from_the_interval() -> None:
    text = json.loads((FOLDER / "qwen3.5-27b" / "config.json").read_text())["text_config"]
    text |= {"architectures": ["Qwen3_5ForCausalLM"]}
    named, unnamed = shape_of(text, "here"), shape_of({k: v for k, v in text.items() if k != "layer_types"}, "here")
    assert named == unnamed
    assert not named.has_images


def test_models_with_images_are_read_as_published() -> None:
    """The published config.json of Gemma-3 leaves out what transformers assumes."""
    assumed = Gemma3TextConfig()
    assert {name: getattr(assumed, name) for name in GEMMA3_DEFAULTS} == GEMMA3_DEFAULTS
    assert Gemma2Config().attn_logit_softcapping == SOFT_CAPS["Gemma2ForCausalLM"]
    small, large, mistral = shape("gemma3-4b"), shape("gemma3-27b"), shape("mistral-small-3.1-24b")
    assert (small.num_heads, small.num_kv_heads, small.head_size) == (8, 4, 256)
    assert (large.num_heads, large.num_kv_heads, large.head_size) == (32, 16, 128)
    assert small.full_layers == (5, 11, 17, 23, 29)
    assert small.window == large.window == 1024
    # max_position_embeddings counts the scaling of Gemma-3 by 8 already.
    assert small.max_positions == large.max_positions == mistral.max_positions == 131072
    assert small.tied_embeddings
    assert not mistral.tied_embeddings
    assert all(found.has_images for found in (small, large, mistral))
    assert [found.serves_text_alone for found in (small, large, mistral)] == [True, True, False]
    assert (shape("gemma2-9b").soft_cap, small.soft_cap) == (50, 0)


def test_head_size_and_ties_are_read() -> None:
    assert shape_of(LLAMA, "here").head_size == 8
    assert shape_of(changed(head_dim=32), "here").head_size == 32
    untied, tied = shape_of(LLAMA, "here"), shape_of(changed(tie_word_embeddings=True), "here")
    assert untied.parameters() - tied.parameters() == 1000 * 64
    assert shape_of(changed(architectures=["Gemma2ForCausalLM"]), "here").tied_embeddings


@pytest.mark.parametrize(
    ("entries", "windowed"),
    [
        ({}, ()),
        ({"sliding_window": 512}, (0, 1, 2, 3)),
        ({"sliding_window": 512, "use_sliding_window": False}, ()),
        ({"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 3}, (3,)),
        ({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 2}, (0, 2)),
        ({"sliding_window": 512, "architectures": ["Gemma2ForCausalLM"]}, (0, 2)),
        ({"sliding_window": 512, "architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 2}, (0, 2)),
        ({"sliding_window": 512, "architectures": ["Gemma3ForCausalLM"]}, (0, 1, 2, 3)),
    ],
)
def test_windows(entries: dict[str, Any], windowed: tuple[int, ...]) -> None:
    found = shape_of(changed(**entries), "here")
    assert found.windowed_layers == windowed
    assert found.window == (512 if windowed else 0)
    assert sorted(found.full_layers + found.windowed_layers) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 4096),
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}, 2048),
        ({"type": "linear", "factor": 2.0}, 8192),
    ],
)
def test_the_longest_context_is_vllms(scaling: dict[str, Any] | None, positions: int) -> None:
    assert shape_of(changed(rope_scaling=scaling), "here").max_positions == positions


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "the architecture MambaForCausalLM is not supported"),
        ({"architectures": ...}, "the architecture none is not supported"),
        (
            {"architectures": ["PanguEmbeddedForCausalLM"], "interleaved_sliding_window": [512, 64]},
            "the architecture PanguEmbeddedForCausalLM is not supported",
        ),
        ({"num_local_experts": 8}, "mixture of experts (num_local_experts 8)"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"linear_num_value_heads": 32}, "linear attention"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual-chunk attention (dual_chunk_attention_config), wh"),
        ({"param_sink_number": 4}, "attention with static sinks (param_sink_number 4)"),
        ({"rswa_window": 64}, "(R-SWA) (rswa_window 64)"),
        ({"hidden_size": ...}, "has no hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_attention_heads": 128}, "num_attention_heads 128 is more than hidden_size 64"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    ],
)
def test_what_is_not_counted_is_one_sentence(entries: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as error:
        shape_of(changed(**entries), "config.json")
    assert said in str(error.value)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


def test_folders_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"meta-llama/Llama-2-7b-hf is not a folder here; .* not looked up"):
        read("meta-llama/Llama-2-7b-hf")
    with pytest.raises(PlanError, match=r"contains no config\.json"):
        read(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlanError, match="cannot be read as JSON"):
        read(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(changed(rope_scaling={"type": "linear", "factor": "two"})))
    with pytest.raises(PlanError, match="has an entry of an unexpected kind"):
        read(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(PlanError, match="does not contain a JSON object"):
        read(str(tmp_path))


@pytest.mark.parametrize(("ranks", "possible"), [(3, False), (16, False), (1, True), (2, True), (4, True), (8, True)])
def test_ranks_divide_the_heads(ranks: int, possible: bool) -> None:
    found = shape_of(LLAMA, "here")
    if possible:
        found.check_ranks(ranks)
        return
    with pytest.raises(PlanError, match=f"--tp {ranks} does not divide .* possible values: 1, 2, 4, 8"):
        found.check_ranks(ranks)


def test_ranks_divide_the_mlp() -> None:
    with pytest.raises(PlanError, match=r"intermediate_size 100; possible values: 1, 2, 4\."):
        shape_of(changed(intermediate_size=100), "here").check_ranks(8)
