"""Engines with an fp8 KV cache against references whose keys and values are rounded as that cache rounds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from fastattention_vllm.integration.cpu.backend import FastAttentionImpl
from tests import reference_models as reference
from tests.integration.engine import MAX_TOKENS, engine, generate
from tests.reference_models import Answer, Rounding, hugging_face_answers, random_prompts, save_random

# Chunks of 64, blocks of 16 and the window of 48 all end within these.
LENGTHS = (1, 16, 65, 130)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

CACHES = [("fp8_e4m3", E4M3), ("fp8_e5m2", E5M2)]

MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: reference.llama(4, 2, 64),
    "gpt-oss": reference.gpt_oss,
}


def rounding(dtype: torch.dtype, scale: float = 1.0) -> Rounding:
    largest = torch.finfo(dtype).max
    return lambda x: (x / scale).clamp(-largest, largest).to(dtype).float() * scale


def distance(answers: Sequence[Answer], others: Sequence[Answer]) -> float:
    """Mean difference of the log-probabilities, as far as the tokens agree."""
    differences = []
    for a, b in zip(answers, others, strict=True):
        for ours, theirs, x, y in zip(a.token_ids, b.token_ids, a.logprobs, b.logprobs, strict=True):
            if ours != theirs:
                break
            differences.append(abs(x - y))
    assert len(differences) > len(LENGTHS)
    return sum(differences) / len(differences)


def answers(model: Path, kv_cache_dtype: str, scales: tuple[float, float] = (1.0, 1.0)) -> list[Answer]:
    """The engine's. A checkpoint's scales end up in the attributes that are written here."""
    with engine(model, kv_cache_dtype=kv_cache_dtype) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert len(layers) > 2
        for layer in layers:
            layer._k_scale_float, layer._v_scale_float = scales
        completions = [output.outputs[0] for output in generate(llm, random_prompts(LENGTHS))]
    return [
        Answer(list(c.token_ids), [step[token].logprob for step, token in zip(c.logprobs, c.token_ids, strict=True)])
        for c in completions
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("kv_cache_dtype", "dtype"), CACHES)
def test_answers_are_those_over_rounded_keys_and_values(
    name: str, kv_cache_dtype: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: the same engine with an fp32 cache, into which keys and values go by way of torch's fp8.

    Scales are powers of two, as others round differently before and after the dot product.
    """
    model, scales = save_random(MODELS[name](), tmp_path), (0.25, 0.125)
    got = answers(model, kv_cache_dtype, scales)
    write = FastAttentionImpl.do_kv_cache_update

    def write_rounded(
        self: FastAttentionImpl, layer: Any, key: torch.Tensor, value: torch.Tensor, *more: torch.Tensor
    ) -> None:
        write(self, layer, rounding(dtype, scales[0])(key), rounding(dtype, scales[1])(value), *more)

    assert answers(model, "auto") != got, "the rounding must show"
    monkeypatch.setattr(FastAttentionImpl, "do_kv_cache_update", write_rounded)
    assert answers(model, "auto") == got


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.03, 0.011)])
@pytest.mark.parametrize(("kv_cache_dtype", "dtype"), CACHES)
def test_answers_are_near_hugging_face_on_rounded_keys_and_values(
    kv_cache_dtype: str, dtype: torch.dtype, scales: tuple[float, float], tmp_path: Path
) -> None:
    """Not at the tolerance of other engine tests: a number that lies half-way between two of fp8, to the last bits of
    fp32, may go up in one program and down in the other. Few do: what is left is small beside what rounding changes.
    """
    model, prompts = save_random(MODELS["llama"](), tmp_path), random_prompts(LENGTHS)
    rounded = hugging_face_answers(model, prompts, MAX_TOKENS, (rounding(dtype, scales[0]), rounding(dtype, scales[1])))
    exact = hugging_face_answers(model, prompts, MAX_TOKENS)
    got = answers(model, kv_cache_dtype, scales)
    assert 10 * distance(got, rounded) < distance(exact, rounded)
