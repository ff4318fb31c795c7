"""One request's KV bytes, compared with the blocks that vLLM itself counts for the same model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PretrainedConfig
from vllm.model_executor import models

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.cpu import resources as cpu_resources
from fastattention_vllm.integration.kv_size import kv_size_of, layers_of
from fastattention_vllm.placement.kv_size import KvSize
from tests import reference_models as reference
from tests.integration.engine import engine, generate
from tests.integration.test_models import core_first
from tests.reference_models import random_prompts, save_random

LENGTH = 700


def changed(config: PretrainedConfig, **entries: Any) -> PretrainedConfig:
    for name, value in entries.items():
        setattr(config, name, value)
    return config


MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "full": lambda: reference.llama(4, 2, 64),
    "windowed": reference.mistral,
    "half and half": reference.gpt_oss,
    "five to one": reference.gemma3,
    "a step of the whole request": reference.gemma3,
    "one token more": lambda: changed(reference.cohere2(), sliding_window=49),
    "two lengths": lambda: reference.pangu([100, 7, None, 100]),
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


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (reference.mistral, [reference.WINDOW] * 3),
        (reference.gemma2, [reference.WINDOW, None] * 2),
        (reference.cohere2, [reference.WINDOW + 1] * 3 + [None]),
        (lambda: reference.pangu([100, 7, None, 100]), [100, 7, None, 100]),
        (lambda: changed(reference.llama(4, 2, 32, 4), interleaved_sliding_window=[100, 7]), [100, 7, 100, 7]),
        (lambda: changed(reference.gemma2(), sliding_windows=[7, 0, 9, 0]), [7, None, 9, None]),
        (lambda: changed(reference.llama(4, 2, 32), interleaved_sliding_window=100), [None] * 3),
    ],
    ids=["all", "half", "one token more", "openPangu", "repeated", "by layer", "unsaid"],
)
def test_windows_are_those_of_vllms_models(
    config: Callable[[], PretrainedConfig], windows: list[int | None], tmp_path: Path
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    made = config()
    made.architectures = ["LlamaForCausalLM"]
    made.save_pretrained(tmp_path)
    arguments = EngineArgs(model=str(tmp_path), attention_backend="fastattention", skip_tokenizer_init=True)
    layers = layers_of(arguments.create_engine_config())
    seen = dict(zip(layers.windowed, layers.windows, strict=True))
    assert [seen.get(index) for index in range(len(windows))] == windows
    assert layers.full == tuple(index for index, window in enumerate(windows) if window is None)


def test_no_other_decoder_of_vllm_sees_more_than_its_window() -> None:
    """vLLM's models that add to the window of config.json; the others here attend in both directions."""
    encoders = {"modernbert.py", "openai_privacy_filter.py"}
    decoders = {"commandr.py", "cohere2_moe.py"}
    folder = Path(models.__file__).parent
    adding = {path.name for path in folder.glob("*.py") if re.search(r"sliding_window \+ \d", path.read_text())}
    assert adding <= encoders | decoders


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
