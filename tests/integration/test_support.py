"""Every row of the refusal table fires on a configuration that asks for it, and on nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.support import UNSUPPORTED, check_supported


def config(**changes: Any) -> Any:
    """A Llama-like configuration; ``changes`` are set on the part that has the attribute."""
    text = SimpleNamespace(model_type="llama", attn_logit_softcapping=None, layer_types=None, sliding_window=None)
    model = SimpleNamespace(
        hf_text_config=text,
        use_mla=False,
        attn_type="decoder",
        is_multimodal_model=False,
        disable_sliding_window=False,
        get_sliding_window=lambda: text.sliding_window,
        get_head_size=lambda: changes.get("head_size", 128),
    )
    cache = SimpleNamespace(cache_dtype="auto")
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    whole = SimpleNamespace(
        model_config=model,
        cache_config=cache,
        parallel_config=parallel,
        speculative_config=None,
        kv_transfer_config=None,
    )
    for name, value in changes.items():
        for part in (text, model, cache, parallel, whole):
            if hasattr(part, name):
                setattr(part, name, value)
                break
        else:
            setattr(text, name, value)
    return whole


CASES: dict[str, dict[str, Any]] = {
    "multi-head latent attention": {"use_mla": True, "model_type": "deepseek_v3"},
    "a model whose attention is not causal decoder attention": {"attn_type": "encoder_only"},
    "a multimodal model": {"is_multimodal_model": True},
    "sliding-window attention": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 512},
    "attention logit soft-capping": {"attn_logit_softcapping": 50.0},
    "ALiBi position bias": {"alibi": True},
    "attention sinks": {"model_type": "gpt_oss"},
    "this head size": {"head_size": 512},
    "a quantised KV cache": {"cache_dtype": "fp8"},
    "speculative decoding": {"speculative_config": object()},
    "a KV connector": {"kv_transfer_config": object()},
    "context parallelism": {"decode_context_parallel_size": 2},
}


def test_every_row_has_a_case() -> None:
    assert set(CASES) == {row.feature for row in UNSUPPORTED}


def test_a_plain_decoder_is_accepted() -> None:
    check_supported(config())


@pytest.mark.parametrize("feature", CASES)
def test_the_sentence_names_feature_reason_and_remedy(feature: str) -> None:
    (row,) = (row for row in UNSUPPORTED if row.feature == feature)
    with pytest.raises(Refusal) as caught:
        check_supported(config(**CASES[feature]))
    message = str(caught.value)
    assert message.startswith(feature)
    assert row.why in message
    assert row.instead in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"] * 4, "sliding_window": None},
        {"layer_types": ["sliding_attention"], "disable_sliding_window": True},
        {"head_size": 80},
        {"cache_dtype": "bfloat16"},
    ],
)
def test_harmless_settings_are_accepted(changes: dict[str, Any]) -> None:
    check_supported(config(**changes))


@pytest.mark.parametrize("changes", [{"attn_config": {"alibi": True}}, {"model_type": "bloom"}])
def test_alibi_is_found_where_models_keep_it(changes: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match="ALiBi"):
        check_supported(config(**changes))
