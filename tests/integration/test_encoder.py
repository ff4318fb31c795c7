"""Embedding models: every token's embedding equals Hugging Face's last hidden state, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, PretrainedConfig

from fastattention_vllm.demo.tokenizer import save_tokenizer
from tests import reference_models as reference
from tests.integration.engine import engine
from tests.reference_models import hugging_face_states, random_prompts, save_random

# Lengths around the borders of tiles and windows; several requests of different lengths in one step.
LENGTHS = (1, 2, 16, 47, 48, 49, 97, 130, 300)

ENCODERS: dict[str, Callable[[], PretrainedConfig]] = {"bert": reference.bert, "modernbert": reference.modernbert}


def check_embeddings(model: Path, **changes: Any) -> None:
    prompts = random_prompts(LENGTHS)
    expected = hugging_face_states(model, prompts)
    pooler = {"task": "token_embed"}
    save_tokenizer(model, 512)  # vLLM's pooling entry points need one, even for token ids
    with engine(model, runner="pooling", skip_tokenizer_init=False, pooler_config=pooler, **changes) as llm:
        outputs = llm.encode([{"prompt_token_ids": p} for p in prompts], pooling_task="token_embed", use_tqdm=False)
    for output, states in zip(outputs, expected, strict=True):
        # vLLM normalises token embeddings to length 1.
        wanted = torch.nn.functional.normalize(states, dim=-1)
        torch.testing.assert_close(output.outputs.data, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_equal_hugging_face(name: str, tmp_path: Path) -> None:
    model = save_random(ENCODERS[name](), tmp_path, kind=AutoModel)
    # Encoder-only requests cannot be split into chunks, so a step must hold the longest of them.
    check_embeddings(model, max_model_len=512, max_num_batched_tokens=512)


@pytest.mark.more
def test_compiled_equals_hugging_face(tmp_path: Path) -> None:
    model = save_random(reference.modernbert(), tmp_path, kind=AutoModel)
    check_embeddings(model, max_model_len=512, max_num_batched_tokens=512, enforce_eager=False)


def test_causal_embeddings_equal_hugging_face(tmp_path: Path) -> None:
    check_embeddings(save_random(reference.llama(4, 2, 64), tmp_path, kind=AutoModel))
