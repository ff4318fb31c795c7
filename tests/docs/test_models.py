"""docs/models.md: the tests that it names exist, its table is filled, and every architecture of vLLM has an answer."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope
from vllm.model_executor.models.interfaces import is_attention_free, is_hybrid, supports_multimodal
from vllm.model_executor.models.registry import _VLLM_MODELS, ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

from fastattention_vllm.integration.support import OWN_ATTENTION
from scripts.vllm_models import RULES, Found, by_rule, found, installed
from tests.docs.pages import DOCS, node_exists

TEXT = (DOCS / "models.md").read_text()
ROWS = [line.strip("|").split("|") for line in TEXT.splitlines() if line.startswith("| ") and "---" not in line]
MODELS, DRAFTERS = ([row for row in ROWS if len(row) == columns] for columns in (7, 3))


@pytest.mark.parametrize("node", sorted(set(re.findall(r"`(tests/\S+::\w+)`", TEXT))))
def test_the_tests_exist(node: str) -> None:
    assert node_exists(node)


def test_every_model_has_an_answer_for_every_device() -> None:
    assert len(MODELS) > 10
    assert len(DRAFTERS) > 4
    assert len(MODELS) + len(DRAFTERS) == len(ROWS)
    assert all(cell.strip() for row in ROWS for cell in row)


def test_every_architecture_of_vllm_falls_under_a_rule() -> None:
    answers = by_rule(installed())
    assert answers.keys() == {rule.title for rule in RULES}, f"no rule knows {answers.get('')}"
    assert sorted(one for named in answers.values() for one in named) == sorted(_VLLM_MODELS)
    assert all(answers.values())


@pytest.mark.parametrize("table", installed().categories)
def test_no_rule_takes_what_is_left(table: str) -> None:
    """A model that computes attention in a way that no rule asks for."""
    other = Found("OtherForCausalLM", frozenset({table}), frozenset({"vllm.models.other"}), frozenset({"LinearBase"}))
    rules = [rule.title for rule in RULES if rule.asked(other)]
    assert rules == (["Drafters"] if table == "_SPECULATIVE_DECODING_MODELS" else [])


@pytest.mark.parametrize(
    "architecture", ["JambaForCausalLM", "Mamba2ForCausalLM", "MolmoForCausalLM", "OPTForCausalLM"]
)
def test_the_source_says_what_the_class_says(architecture: str) -> None:
    model = ModelRegistry.models[architecture].load_model_cls()
    genuine = {
        "IsHybrid": is_hybrid(model),
        "IsAttentionFree": is_attention_free(model),
        "SupportsMultiModal": supports_multimodal(model),
    }
    read = found(installed(), architecture).names
    assert {name: name in read for name in genuine} == genuine


def test_attention_in_layers_of_their_own_is_refused_by_name() -> None:
    """With images, such a model has an architecture of its own, whose code only names the architecture of its text."""
    (own,) = (rule for rule in RULES if rule.title == "Attention in layers of their own")
    named = by_rule(installed())[own.title]
    with_images = {one.replace("ForCausalLM", "ForConditionalGeneration") for one in named} & _VLLM_MODELS.keys()
    assert {*named, *with_images} <= OWN_ATTENTION.keys()


@pytest.mark.parametrize("model", ["Qwen4Exp", "GlmMoeDsa", "Glm5Next", "DeepseekV4", "KimiK3", "MiniMaxM3Sparse"])
def test_this_autumns_models_are_named(model: str) -> None:
    assert re.search(rf"`{model}For\w+`", TEXT)


def test_prefix_caching_of_hybrids_is_asked_for() -> None:
    """vLLM's own parser takes the options of the page."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    (options,) = set(re.findall(r"`(--enable-prefix-caching --mamba-cache-mode \w+)`", TEXT))
    asked = parser.parse_args(options.split())
    assert (asked.enable_prefix_caching, asked.mamba_cache_mode) == (True, "align")


def test_vllm_refuses_two_parameters_beside_drafts() -> None:
    drafts: Any = object()
    for asked in (SamplingParams(min_p=0.1), SamplingParams(logit_bias={3: 1.0})):
        asked._validate_spec_decode(None)
        with pytest.raises(
            VLLMValidationError, match="min_p and logit_bias sampling parameters are not yet supported with spec"
        ):
            asked._validate_spec_decode(drafts)


def test_phi3_takes_the_long_factors_for_all_requests() -> None:
    """vLLM's code: one set of factors for the server, by --max-model-len."""
    source = inspect.getsource(phi3_long_rope_scaled_rope)
    assert "self.use_long_rope = max_model_len > original_max_position_embeddings" in source
