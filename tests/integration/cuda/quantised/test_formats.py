"""The tests' checkpoints are what others read and write: compressed-tensors, and vLLM's packers of GPTQ and AWQ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack, gptq_pack

from tests import reference_models as reference
from tests.integration.cuda.quantised.checkpoints import PROJECTIONS, write
from tests.integration.cuda.quantised.formats import AWQ_ORDER, FORMATS, words
from tests.reference_models import save_random


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = reference.qwen3(4, 2, 64, layers=1)
    config.hidden_size = 256  # with a single block of inputs, the scales of blocks look like scales of channels
    return save_random(config, tmp_path_factory.mktemp("qwen3"))


QUICK = ("packed-order-zero-points", "floats-block")
READ = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.more)
    for name in FORMATS
    if name.startswith(("packed", "floats"))
]


@pytest.mark.parametrize("name", READ)
def test_compressed_tensors_reads_the_same_weights(name: str, model: Path, tmp_path: Path) -> None:
    found = write(model, FORMATS[name], tmp_path)
    how = CompressedTensorsConfig(run_compressed=False)
    read = AutoModelForCausalLM.from_pretrained(found.quantised, dtype=torch.float16, quantization_config=how)
    held, compared = read.state_dict(), 0
    for key, weight in load_file(found.plain / "model.safetensors").items():
        if PROJECTIONS.fullmatch(key):
            compared += 1
            # One rounding to fp16 more or less.
            torch.testing.assert_close(held[key].float(), weight.float(), rtol=2**-9, atol=1e-6)
    assert compared == 7


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_those_of_vllms_packers(bits: int) -> None:
    k, n = 64, 24
    numbers = torch.randint(0, 1 << bits, (k, n), generator=torch.Generator().manual_seed(bits), dtype=torch.int32)
    assert torch.equal(words(numbers.t(), bits).t(), gptq_pack(numbers, bits, k, n))
    if bits == 4:
        assert torch.equal(words(numbers, bits, AWQ_ORDER), awq_pack(numbers, bits, k, n))
