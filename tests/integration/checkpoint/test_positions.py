"""A length beyond the model's table of positions is refused. YaRN as the sentence gives it is exact."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.checkpoint import positions as checked
from fastattention_vllm.integration.checkpoint.positions import check_positions, positions_of
from fastattention_vllm.integration.refusal import Refusal
from tests import image_references
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
    refused = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=config, max_model_len=positions + 1, original_max_model_len=positions + 1
        )
    )
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


COHERE = "getattr(config, 'model_max_length', None) or getattr(config, 'max_position_embeddings', 8192)"
LENGTHS = {
    "max_position_embeddings": 100,
    "model_max_length": 200,
    "seq_length": 300,
    "max_seq_len": 400,
    "max_position_embedding": 500,
    "max_context": 600,
    "max_model_len": 700,
}
"""Of a configuration that has all of them."""
OWN_FORMS = {
    COHERE: ["cohere", "cohere2", "cohere2_moe"],
    "max(config.max_position_embeddings, config.max_model_len)": ["minimax_m2"],
    "getattr(config, 'seq_length', 8192)": ["chatglm"],
    "config.max_seq_len": ["dbrx"],
    "config.max_position_embedding": ["step3_text"],
    "config.max_context": ["moondream3_text"],
}
"""What vLLM's models of these types pass to get_rope, if it is not max_position_embeddings alone."""
NOT_OF_TEXT = {
    "8192": "image encoders",
    "(config.image_size // config.patch_size) ** 2": "the same",
    "int(rope_parameters['original_max_position_embeddings'] * factor)": "DeepSeek-V4's, whose attention is refused",
    "min(max_position, vllm_config.model_config.max_model_len)": "as long as the longest request, or as the table",
    "max_position": "EmbeddingGemma-2's, given by position: never more than max_position_embeddings",
    "max_position_embeddings": "an argument of a function in another file",
    "self.max_position_embeddings": "set by a parent class in another file",
}
ALWAYS_THE_SAME = re.compile(
    r"(text_|self\.)?config\.max_position_embeddings"
    r"|getattr\(config, 'max_position_embeddings', [0-9]+\)"
    r"|max_position_embeddings or config\.max_position_embeddings"
)


def forms(source: str) -> Iterator[str]:
    """What a module's models pass to get_rope as max_position, followed through assignments and arguments."""
    tree = ast.parse(source)
    given: dict[str, list[ast.expr]] = defaultdict(list)
    defaults: dict[str, list[ast.expr]] = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                given[ast.unparse(target)].append(node.value)
        elif isinstance(node, ast.keyword) and node.arg:
            given[node.arg].append(node.value)
        elif isinstance(node, ast.arguments):
            for argument, default in zip(node.args[::-1], node.defaults[::-1], strict=False):
                defaults[argument.arg].append(default)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] != "get_rope":
            continue
        wanted = [argument.value for argument in node.keywords if argument.arg == "max_position"] or node.args[1:2]
        seen = set()
        while wanted:
            text = ast.unparse(wanted.pop())
            if text in seen:
                continue
            seen.add(text)
            # A default counts only where no caller in this file gives the argument.
            found = [value for value in given[text] if ast.unparse(value) != text] or defaults[text]
            wanted += found
            if not found:
                yield text


def test_every_form_of_vllms_models_is_known() -> None:
    """A new one needs a rule in positions.py, or a reason here why it needs none."""
    folder = Path(vllm.__file__).parent
    files = [*(folder / "model_executor" / "models").rglob("*.py"), *(folder / "models").rglob("*.py")]
    found = {form: file.relative_to(folder) for file in files for form in forms(file.read_text())}
    assert len(found) > 10
    new = {form: file for form, file in found.items() if not ALWAYS_THE_SAME.fullmatch(form)}
    assert set(new) <= {*OWN_FORMS, *NOT_OF_TEXT}, new


@pytest.mark.parametrize(("form", "kind"), [(form, kind) for form, kinds in OWN_FORMS.items() for kind in kinds])
def test_each_form_has_its_rule(form: str, kind: str) -> None:
    config = SimpleNamespace(model_type=kind, **LENGTHS)
    assert positions_of(config) == [eval(form, {"config": config})]
    assert kind in checked.OTHER_NAMES or kind == "minimax_m2"


def test_other_models_have_the_usual_attribute() -> None:
    assert positions_of(SimpleNamespace(model_type="llama", **LENGTHS)) == [100]
    assert positions_of(SimpleNamespace(model_type="cohere", max_position_embeddings=100)) == [100]
    assert positions_of(SimpleNamespace(**LENGTHS, rotary_kwargs={"max_position": 104})) == [104]


def test_command_r_starts_with_the_length_that_vllm_gives_it(tmp_path: Path) -> None:
    """Its configuration has two lengths, and its table has the longer one."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"architectures": ["CohereForCausalLM"], "model_type": "cohere", "vocab_size": 64, **shape}
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 512, "model_max_length": 2048})
    )
    model = asked(tmp_path, skip_tokenizer_init=True)
    assert model.max_model_len == 2048
    check_positions(SimpleNamespace(model_config=model))  # type: ignore[arg-type]
    assert model.max_model_len == 2048


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0} | THETA}


@pytest.mark.parametrize("automatic", [None, -1])
def test_a_length_that_vllm_chose_is_lowered(short: Path, automatic: int | None) -> None:
    """Of InternLM, for example: vLLM multiplies the length by the factor, and 0.32 makes no longer table."""
    if compat.dynamic_tables_are_scaled():
        pytest.skip("this vLLM's table is as long as the length that it chooses")
    model = asked(short, hf_overrides=DYNAMIC, max_model_len=automatic)
    assert model.max_model_len == 256
    cache = SimpleNamespace(mamba_block_size=256)
    check_positions(SimpleNamespace(model_config=model, cache_config=cache))  # type: ignore[arg-type]
    assert model.max_model_len == cache.mamba_block_size == 128
    assert "longer than the 128 positions" in refused(short, hf_overrides=DYNAMIC, max_model_len=256)


@pytest.mark.more
def test_an_engine_with_a_lowered_length_refuses_longer_requests(short: Path) -> None:
    if compat.dynamic_tables_are_scaled():
        pytest.skip("this vLLM's table is as long as the length that it chooses")
    with engine(short, hf_overrides=DYNAMIC, max_model_len=None) as llm:
        assert llm.llm_engine.model_config.max_model_len == 128
        assert len(generate(llm, models.random_prompts([100]))) == 1
        with pytest.raises(Exception, match="128"):
            generate(llm, models.random_prompts([130]))


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


def test_a_model_with_images_is_extended_in_its_text_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So far that vLLM accepts the length, although the table alone would have so many rows with a smaller factor."""
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    config = image_references.qwen2_5_vl()
    config.text_config.max_position_embeddings = 128
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    sentence = refused(tmp_path, max_model_len=600, skip_tokenizer_init=True)
    assert "than the 512 positions" in sentence
    overrides = overrides_of(sentence)
    assert overrides["text_config"]["rope_parameters"]["factor"] == 5.0
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN")
    again = asked(tmp_path, max_model_len=600, skip_tokenizer_init=True, hf_overrides=overrides)
    check_positions(SimpleNamespace(model_config=again))  # type: ignore[arg-type]
    assert positions_of(again.hf_text_config) == [4 * 640]


def test_a_text_model_in_an_unknown_place_is_not_extended() -> None:
    text = SimpleNamespace(max_position_embeddings=128, rope_parameters={"rope_type": "default"} | THETA)
    thinker = SimpleNamespace(thinker_config=SimpleNamespace(text_config=text))
    model = SimpleNamespace(hf_config=thinker, hf_text_config=text, max_model_len=200, original_max_model_len=200)
    with pytest.raises(Refusal, match=r"pass --max-model-len 128 or less\.$"):
        check_positions(SimpleNamespace(model_config=model))  # type: ignore[arg-type]


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
