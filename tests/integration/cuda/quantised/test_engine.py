"""Whole models with quantised weights, served by a real engine: the answers are those of the unquantised copy.

The engine runs on the CPU, with the kernels' CPU reference. tests/gpu/test_volta_quantised.py does the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from fastattention_vllm.integration import support
from fastattention_vllm.integration.cuda.quantised import registration
from tests import reference_models as reference
from tests.integration.cuda.quantised.checkpoints import ALLOWED, Checkpoints, compare, write
from tests.integration.cuda.quantised.formats import FORMATS
from tests.integration.cuda.quantised.registered import unregister
from tests.integration.engine import engine, generate
from tests.integration.test_lora import RANK, make_adapter
from tests.reference_models import random_prompts, save_random

pytestmark = pytest.mark.more

CPU: dict[str, Any] = {"dtype": "float16", "max_model_len": 256}
LENGTHS = (1, 17, 70)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the plugin does on GPUs. On CPUs it refuses quantised weights."""
    unregister()
    monkeypatch.setattr(type(current_platform), "supported_quantization", [])
    left = tuple(one for one in support.UNSUPPORTED if one.feature != "weight quantisation")
    assert len(left) == len(support.UNSUPPORTED) - 1
    monkeypatch.setattr(support, "UNSUPPORTED", left)
    registration.install()
    yield
    unregister()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(reference.qwen3(4, 2, 64, layers=2), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for a block of scales on each of two ranks."""
    return save_random(reference.qwen3(4, 2, 128, layers=2), tmp_path_factory.mktemp("wide"))


def check(found: Checkpoints, **changes: Any) -> None:
    with engine(found.quantised, quantization="fastattention", **(CPU | changes)) as llm:
        outputs = generate(llm, random_prompts(LENGTHS))
    compare(outputs, found.plain)


@pytest.mark.parametrize(
    "name", ["awq", "gptq-order", "gptq-8-bits-zero-points", "packed-channel", "floats-tensor", "fp8-block"]
)
def test_answers_are_those_of_the_unquantised_copy(name: str, model: Path, tmp_path: Path) -> None:
    check(write(model, FORMATS[name], tmp_path))


def test_some_layers_are_unquantised(model: Path, tmp_path: Path) -> None:
    """vLLM finds by the dtypes in the files that layer 1 of this checkpoint is unquantised."""
    found = write(model, FORMATS["awq"], tmp_path, left="layers.1.")
    check(found)


def test_lora_adapters_beside_quantised_weights(model: Path, tmp_path: Path) -> None:
    found = write(model, FORMATS["packed"], tmp_path)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    make_adapter(found.plain, adapter, merged, seed=1)
    request = LoRARequest("adapter", 1, str(adapter))
    changes = {"quantization": "fastattention", "enable_lora": True, "max_lora_rank": RANK}
    with engine(found.quantised, **CPU | changes) as llm:
        with_adapter = generate(llm, random_prompts(LENGTHS), lora_request=request)
        without = generate(llm, random_prompts(LENGTHS))
    # An adapter is computed in fp16 beside the layer and changes the logits by far more than this.
    compare(with_adapter, merged, allowed=4 * ALLOWED)
    compare(without, found.plain)


@pytest.mark.parametrize("name", ["gptq-8-bits-zero-points", "fp8-block"])
def test_two_ranks(name: str, wide: Path, tmp_path: Path) -> None:
    """The ranks are forked from this process, so the formats are registered in them, too."""
    check(write(wide, FORMATS[name], tmp_path), tensor_parallel_size=2, distributed_executor_backend="mp")
