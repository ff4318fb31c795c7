"""A length beyond the model's table of positions is refused. YaRN as the sentence gives it is exact."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from fastattention_vllm.integration.checkpoint.positions import check_positions, positions_of
from fastattention_vllm.integration.refusal import Refusal
from tests import reference_models as models
from tests.integration.engine import check, engine, generate

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
THETA = {"rope_theta": 10000.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128} | THETA
IMAGES = {"mrope_section": [2, 3, 3]}
LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"} | THETA,
        {"rope_type": "llama3", "factor": 4.0} | LLAMA3 | THETA,
        {"rope_type": "linear", "factor": 3.0} | THETA,
        {"rope_type": "dynamic", "factor": 2.5} | THETA,
        {"rope_type": "dynamic", "alpha": 10.0} | THETA,
        YARN,
        YARN | {"original_max_position_embeddings": 30, "factor": 2.0},
        {"rope_type": "default"} | IMAGES | THETA,
        YARN | IMAGES,
    ],
    ids=lambda parameters: "-".join(map(str, parameters.values())),
)
def test_tables_are_as_long_as_vllms(parameters: dict[str, Any]) -> None:
    text = SimpleNamespace(max_position_embeddings=128, rope_parameters=parameters)
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(16, 128, rope_parameters=dict(parameters), dtype=torch.float32)
    assert positions_of(text) == [rope.cos_sin_cache.shape[0]]


def test_longrope_has_a_second_table_beside_the_original_one() -> None:
    parameters = {"rope_type": "longrope"} | LONGROPE | THETA
    config = VllmConfig()
    object.__setattr__(config, "model_config", SimpleNamespace(max_model_len=128))
    with set_current_vllm_config(config):
        rope = get_rope(16, 128, rope_parameters=parameters, dtype=torch.float32)
    found = positions_of(SimpleNamespace(max_position_embeddings=128, rope_parameters=parameters))
    assert found == [rope.long_short_cos_sin_cache.shape[0] - LONGROPE["original_max_position_embeddings"]]


def test_models_without_a_table() -> None:
    assert positions_of(models.bloom()) == []
    assert positions_of(SimpleNamespace(max_position_embeddings=128, alibi=True)) == []
    assert positions_of(models.opt()) == [models.opt().max_position_embeddings]


def test_the_shortest_table_of_a_model_counts() -> None:
    config = models.gemma3()
    kinds = config.rope_parameters
    assert len(kinds) == 2
    kinds["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    positions = config.max_position_embeddings
    assert sorted(positions_of(config)) == [positions, 8 * positions]
    refused = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=config, max_model_len=positions + 1))
    with pytest.raises(Refusal, match=f"longer than the {positions} positions"):
        check_positions(refused)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with 128 positions."""
    config = models.llama(4, 2, 32)
    config.max_position_embeddings = 128
    return models.save_random(config, tmp_path_factory.mktemp("short"))


def asked(model: Path, **arguments: Any) -> ModelConfig:
    return ModelConfig(model=str(model), dtype="float32", **arguments)


def refused(model: Path, **arguments: Any) -> str:
    """The sentence of the refusal."""
    with pytest.raises(Refusal) as error:
        check_positions(SimpleNamespace(model_config=asked(model, **arguments)))  # type: ignore[arg-type]
    return str(error.value)


def test_a_longer_length_is_refused_before_a_process_starts(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    with (
        pytest.raises(ValueError, match="--max-model-len 512 is longer than the 128 positions of this model; pass"),
        engine(short, max_model_len=512),
    ):
        pass


def test_learned_positions_cannot_be_extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    config = models.opt()
    positions = config.max_position_embeddings
    sentence = refused(models.save_random(config, tmp_path), max_model_len=positions + 1)
    assert sentence.endswith(f"pass --max-model-len {positions} or less.")


def test_yarn_that_promises_more_than_its_factor_gives(short: Path) -> None:
    promised = {"rope_parameters": YARN, "max_position_embeddings": 1024}
    sentence = refused(short, max_model_len=1024, hf_overrides=promised)
    assert "than the 512 positions" in sentence
    overrides = overrides_of(sentence)
    assert overrides["rope_parameters"]["factor"] == 8.0
    again = SimpleNamespace(model_config=asked(short, max_model_len=1024, hf_overrides=overrides))
    check_positions(again)  # type: ignore[arg-type]


def overrides_of(text: str) -> dict[str, Any]:
    """The value of --hf-overrides in a text."""
    found = re.search(r"--hf-overrides ('[^']*')", text)
    assert found
    overrides: dict[str, Any] = json.loads(shlex.split(found[1])[0])
    return overrides


def test_the_page_extends_a_model_as_the_sentence_does(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's example is for 32,768 positions, this model has 128. Everything else is equal."""
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    ours = overrides_of(refused(short, max_model_len=512))
    page = overrides_of(PAGE.read_text())
    assert page["rope_parameters"].keys() == ours["rope_parameters"].keys()
    original = page["rope_parameters"]["original_max_position_embeddings"]
    assert page["max_position_embeddings"] == original * page["rope_parameters"]["factor"]


def test_yarn_equals_hugging_face(short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    overrides = overrides_of(refused(short, max_model_len=512))
    for path in short.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(json.loads((short / "config.json").read_text()) | overrides))
    prompts = models.random_prompts([100, 300, 500])
    expected = models.hugging_face_answers(tmp_path, prompts, 12)
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN")
    with engine(short, max_model_len=512, hf_overrides=overrides) as llm:
        check(generate(llm, prompts), expected)
