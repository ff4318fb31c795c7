"""Models with quantised weights, served by a real engine on the V100's kernels, from their PTX.

Answers are compared with Hugging Face on the unquantised copy in fp32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from fastattention_vllm.demo.haystack import make_haystack
from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DemoModelSpec
from fastattention_vllm.demo.tokenizer import token_id
from tests import reference_models as reference
from tests.integration.cuda.quantised.checkpoints import compare, write
from tests.integration.cuda.quantised.formats import FORMATS, awq
from tests.integration.engine import engine, generate
from tests.reference_models import random_prompts, save_random

LENGTHS = (1, 17, 130, 300)
GPU: dict[str, Any] = {
    "quantization": "fastattention",
    "additional_config": {"fastattention": {"volta_kernels": "ptx", "host_kv_layers": 0}},
    "dtype": "float16",
    "max_num_batched_tokens": 256,
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 256 << 20,
}
WHOLE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
"""The default on V100."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(reference.qwen3(4, 2, 64, layers=2), tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize(
    "name",
    ["awq", "gptq", "gptq-order", "gptq-8-bits-zero-points", "packed-channel", "floats-tensor", "fp8-block"],
)
def test_answers_are_those_of_the_unquantised_copy(name: str, model: Path, tmp_path: Path) -> None:
    found = write(model, FORMATS[name], tmp_path)
    with engine(found.quantised, **GPU) as llm:
        outputs = generate(llm, random_prompts(LENGTHS))
    compare(outputs, found.plain, device="cuda")


@pytest.mark.parametrize("compilation", [WHOLE_GRAPHS, {"mode": 3}], ids=["whole-graphs", "torch.compile"])
def test_answers_in_graphs(compilation: dict[str, Any], model: Path, tmp_path: Path) -> None:
    found = write(model, FORMATS["awq"], tmp_path)
    with engine(found.quantised, **GPU | {"enforce_eager": False, "compilation_config": compilation}) as llm:
        outputs = generate(llm, random_prompts(LENGTHS))
    compare(outputs, found.plain, device="cuda")


def test_equal_requests_get_equal_log_probabilities(model: Path, tmp_path: Path) -> None:
    """Sums have a fixed order, so a second engine step with the same inputs has the same bits."""
    found = write(model, FORMATS["awq"], tmp_path)
    with engine(found.quantised, **GPU) as llm:
        runs = [generate(llm, random_prompts(LENGTHS)) for _ in range(2)]
    first, second = ([(out.outputs[0].token_ids, out.outputs[0].cumulative_logprob) for out in run] for run in runs)
    assert first == second


def test_the_needle_is_found_with_4_bits(tmp_path: Path) -> None:
    spec = DemoModelSpec(dtype="float16", min_hidden_size=512, min_intermediate_size=512)
    found = write(build_demo_model(tmp_path / "demo", spec), awq(32), tmp_path)
    prompts = [list(make_haystack(15000, {"alpha": "7319"}, depths=[d], ask="alpha").token_ids) for d in (0.1, 0.9)]
    settings = GPU | {"max_model_len": 16384, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 1 << 30}
    with engine(found.quantised, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert [output.outputs[0].token_ids[0] for output in outputs] == [token_id("7319")] * 2


def test_newer_gpus_are_refused_unless_the_kernels_are_to_be_tested(model: Path, tmp_path: Path) -> None:
    found = write(model, FORMATS["awq"], tmp_path)
    changes = {"additional_config": {"fastattention": {"host_kv_layers": 0}}, "attention_backend": "FLASH_ATTN"}
    with (
        pytest.raises(Exception, match=r"runs the V100's kernels.*remove --quantization fastattention"),
        engine(found.quantised, **GPU | changes),
    ):
        pass
