"""Models with Gated DeltaNet layers against Hugging Face transformers, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PretrainedConfig

from fastattention_vllm.integration import compat
from tests import reference_models as reference
from tests.integration.engine import MAX_TOKENS, check, engine, generate
from tests.integration.test_models import compare, core_first
from tests.reference_models import hugging_face_answers, random_prompts, save_random

pytestmark = pytest.mark.skipif(
    not compat.has_cpu_linear_attention(), reason="this vLLM's operator for these layers is not replaced"
)

MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3.5": reference.qwen3_5,
    "qwen3-next": reference.qwen3_next,
    "qwen3.5-moe": reference.qwen3_5_moe,
}


@pytest.mark.parametrize("name", core_first(MODELS, ["qwen3-next"]))
def test_tokens_and_logprobs_equal_hugging_face(name: str, tmp_path: Path) -> None:
    """Chunked prefill mixed with decode."""
    compare(MODELS[name](), tmp_path)
