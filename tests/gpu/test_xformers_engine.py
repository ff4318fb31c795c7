"""``volta_fallback: xformers`` in real engines: models that the V100's kernels refuse, against Hugging Face in fp32.

xformers calls PyTorch's memory-efficient attention for fp32, and on a V100 always. For fp16, newer GPUs run
FlashAttention instead, so the test of fp16 checks what this plugin passes to xformers, not the V100's kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from tests import reference_models as reference
from tests.gpu.test_engine import LENGTHS
from tests.gpu.test_volta_models import answers, compare, distance, saved
from tests.integration.engine import MAX_TOKENS
from tests.reference_models import hugging_face_answers, random_prompts, save_random

pytest.importorskip("xformers", reason="xformers is not installed")

FALLBACK: dict[str, Any] = {
    "additional_config": {"fastattention": {"volta_kernels": "ptx", "volta_fallback": "xformers"}}
}
ALLOWED_IN_FP32 = 1e-3
MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "full attention": lambda: reference.llama(8, 2, 64),
    "sliding window": reference.mistral,
}


@pytest.mark.parametrize("caching", [False, True], ids=["no caching", "prefix caching"])
@pytest.mark.parametrize("name", MODELS)
def test_models_in_fp32(name: str, caching: bool, tmp_path: Path) -> None:
    model = save_random(MODELS[name](), tmp_path)
    shared = random_prompts([400])[0]
    prompts = [*random_prompts(LENGTHS), shared, [*shared, 5, 6, 7]]
    found = answers(model, prompts, MAX_TOKENS, dtype="float32", enable_prefix_caching=caching, **FALLBACK)
    assert distance(found, hugging_face_answers(model, prompts, MAX_TOKENS)) <= ALLOWED_IN_FP32


def test_a_head_size_that_the_kernels_lack(tmp_path: Path) -> None:
    compare(saved(reference.qwen3(8, 2, 72), tmp_path), FALLBACK)
