"""Engines with an fp8 KV cache against references whose keys and values are rounded in the same way."""

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

# The prompts cross the borders of chunks (64), blocks (16) and the window (48).
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
    """Mean difference of the log-probabilities, up to the first token that differs."""
    differences = []
    for a, b in zip(answers, others, strict=True):
        for ours, theirs, x, y in zip(a.token_ids, b.token_ids, a.logprobs, b.logprobs, strict=True):
            if ours != theirs:
                break
            differences.append(abs(x - y))
    assert len(differences) > len(LENGTHS)
    return sum(differences) / len(differences)


def answers(model: Path, kv_cache_dtype: str, scales: tuple[float, float] = (1.0, 1.0)) -> list[Answer]:
    """The engine's answers. The attributes written here are those that hold a checkpoint's scales."""
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
def test_answers_equal_those_over_rounded_keys_and_values(
    name: str, kv_cache_dtype: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to the last bit: the same engine with an fp32 cache, whose keys and values are rounded by torch's fp8.

    Scales are powers of two, because others round differently before and after the dot product.
    """
    model, scales = save_random(MODELS[name](), tmp_path), (0.25, 0.125)
    got = answers(model, kv_cache_dtype, scales)
    write = FastAttentionImpl.do_kv_cache_update

    def write_rounded(
        self: FastAttentionImpl, layer: Any, key: torch.Tensor, value: torch.Tensor, *more: torch.Tensor
    ) -> None:
        write(self, layer, rounding(dtype, scales[0])(key), rounding(dtype, scales[1])(value), *more)

    assert answers(model, "auto") != got, "the rounding must change the answers"
    monkeypatch.setattr(FastAttentionImpl, "do_kv_cache_update", write_rounded)
    assert answers(model, "auto") == got


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.03, 0.011)])
@pytest.mark.parametrize(("kv_cache_dtype", "dtype"), CACHES)
def test_answers_are_close_to_hugging_face_on_rounded_keys_and_values(
    kv_cache_dtype: str, dtype: torch.dtype, scales: tuple[float, float], tmp_path: Path
) -> None:
    """The tolerance is larger than in other engine tests.

    A number almost exactly half-way between two fp8 values may be rounded up in one program and down in the other. This
    is rare, so the difference is small compared with the effect of the rounding itself.
    """
    model, prompts = save_random(MODELS["llama"](), tmp_path), random_prompts(LENGTHS)
    rounded = hugging_face_answers(model, prompts, MAX_TOKENS, (rounding(dtype, scales[0]), rounding(dtype, scales[1])))
    exact = hugging_face_answers(model, prompts, MAX_TOKENS)
    got = answers(model, kv_cache_dtype, scales)
    assert 10 * distance(got, rounded) < distance(exact, rounded)
