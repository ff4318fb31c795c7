"""One request's KV bytes, compared with the blocks that vLLM itself counts for the same model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PretrainedConfig

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.cpu import resources as cpu_resources
from fastattention_vllm.integration.kv_size import kv_size_of
from fastattention_vllm.placement.kv_size import KvSize
from tests import reference_models as reference
from tests.integration.engine import engine, generate
from tests.integration.test_models import core_first
from tests.reference_models import random_prompts, save_random

LENGTH = 700
MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "full": lambda: reference.llama(4, 2, 64),
    "windowed": reference.mistral,
    "half and half": reference.gpt_oss,
    "five to one": reference.gemma3,
    "a step of the whole request": reference.gemma3,
    "shared": reference.gemma3n,
    "fp8": lambda: reference.llama(4, 2, 64),
    "states": lambda: reference.qwen3_5(layers=8),
    "states and prefix caching": lambda: reference.qwen3_5(layers=8),
}
NEED_LINEAR_ATTENTION = ("states", "states and prefix caching")
ARGUMENTS: dict[str, dict[str, Any]] = {
    "fp8": {"kv_cache_dtype": "fp8"},
    "states and prefix caching": {"enable_prefix_caching": True},
    "a step of the whole request": {"max_num_batched_tokens": 1024},
}


@pytest.mark.parametrize("kind", core_first(MODELS, ["five to one", "a step of the whole request"]))
def test_the_request_fits_into_exactly_its_kv_bytes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly this size runs a request of that length. One byte less than vLLM's own count does not start an engine."""
    if kind in NEED_LINEAR_ATTENTION and not compat.has_cpu_linear_attention():
        pytest.skip("this vLLM's operator for these layers is not replaced")
    model = save_random(MODELS[kind](), tmp_path)
    arguments = {"max_model_len": LENGTH, "block_size": 16, "max_num_seqs": 1} | ARGUMENTS.get(kind, {})
    with engine(model, **arguments) as llm:
        size = kv_size_of(llm.llm_engine.vllm_config)
    exact = size.of_request(LENGTH)
    with engine(model, kv_cache_memory_bytes=exact, **arguments) as llm:
        (output,) = generate(llm, random_prompts([LENGTH - 4]), max_tokens=4)
    assert len(output.outputs[0].token_ids) == 4
    # vLLM does not count the block that it reserves for itself; it refuses one byte less than the others.
    monkeypatch.setattr(cpu_resources, "kv_bytes_per_rank", lambda requested, *_: requested)
    too_small = exact - size.null_block() - 1
    with pytest.raises(ValueError, match="KV cache"), engine(model, kv_cache_memory_bytes=too_small, **arguments):
        pass


def test_encoder_only_models_have_no_cache(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    config = reference.bert()
    config.architectures = ["BertModel"]
    config.save_pretrained(tmp_path)
    arguments = EngineArgs(model=str(tmp_path), runner="pooling", skip_tokenizer_init=True, dtype="float32")
    assert kv_size_of(arguments.create_engine_config()).of_request(512) == 0


@given(
    st.builds(
        KvSize,
        block_size=st.sampled_from([8, 16, 128]),
        bytes_per_block=st.integers(1, 1 << 20),
        full_layers=st.integers(1, 60),
        windowed_layers=st.integers(0, 60),
        window=st.integers(1, 5000),
        tokens_per_step=st.integers(1, 9000),
    ),
    st.integers(1, 1 << 34),
)
def test_the_longest_request_fits_and_the_next_does_not(size: KvSize, budget: int) -> None:
    longest = size.longest_request(budget)
    assert longest % size.block_size == 0
    assert longest == 0 or size.of_request(longest) <= budget
    assert size.of_request(longest + 1) > budget
