"""Host layers in models for which vLLM uses one block table for windowed and full layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastattention_vllm.integration.host_layers import layers as host_layers
from tests import reference_models as reference
from tests.integration.engine import engine, generate
from tests.reference_models import random_prompts, save_random


def test_one_block_table_for_both_kinds_changes_no_answer(tmp_path: Path) -> None:
    """They are ordered as in the model, whatever their kind."""
    save_random(reference.gemma2(), tmp_path)
    prompts = random_prompts((17, 130, 300))
    answers = []
    for host in ([], [0, 1]):
        options = {"fastattention": {"host_kv_layers": host}}
        with engine(tmp_path, block_size=16, disable_hybrid_kv_cache_manager=True, additional_config=options) as llm:
            answers.append([output.outputs[0] for output in generate(llm, prompts, max_tokens=6)])
            found = host_layers.find(llm.llm_engine.vllm_config)
            opened = [layer.layer.layer.layer_name for layer in found.group.layers] if found else []  # type: ignore[attr-defined]
            assert opened == [f"model.layers.{index}.self_attn.attn" for index in host]
    for plain, with_host in zip(*answers, strict=True):
        assert plain.token_ids == with_host.token_ids
        for token, one, other in zip(plain.token_ids, plain.logprobs, with_host.logprobs, strict=True):
            assert other[token].logprob == pytest.approx(one[token].logprob, abs=1e-4)
