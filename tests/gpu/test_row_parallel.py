"""``tiling_all_reduce`` in vLLM on two GPUs does not change the answers, neither eagerly nor with graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import reference_models as reference
from tests.gpu.test_engine import Steps, answers, check
from tests.reference_models import save_random

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

MIN_TOKENS = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(reference.llama(8, 2, 128, layers=3), tmp_path_factory.mktemp("llama"))


CHANGES: dict[str, Any] = {"tensor_parallel_size": 2, "max_num_batched_tokens": 1024}


@pytest.fixture(scope="module")
def expected(model: Path) -> Callable[[bool], list[Steps]]:
    @functools.cache
    def untiled(eager: bool) -> list[Steps]:
        return answers(model, attention_backend="FLASH_ATTN", enforce_eager=eager, **CHANGES)

    return untiled


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    ("blocks", "full", "kernels"), [(3, False, "auto"), (3, True, "auto"), ("auto", False, "auto"), (3, True, "ptx")]
)
def test_answers_equal_those_without_tiling(
    blocks: Any,
    full: bool,
    kernels: str,
    eager: bool,
    model: Path,
    expected: Callable[[bool], list[Steps]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With graphs, those of up to 512 tokens contain tiled layers.

    ``full`` tiles attention and MLPs too. ``ptx`` uses the V100's kernels.
    """
    wanted = expected(eager)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    capfd.readouterr()
    section = {
        "host_kv_layers": 0,
        "tiling_all_reduce": blocks,
        "tiling_min_tokens": MIN_TOKENS,
        "tiling_full_form": full,
    }
    section["volta_kernels"] = kernels
    check(answers(model, enforce_eager=eager, additional_config={"fastattention": section}, **CHANGES), wanted)
    captured = capfd.readouterr()
    log = captured.out + captured.err
    assert "Tiling-AllReduce: 6 row-parallel layers in" in log
    assert ("measuring a layer" in log) == (blocks == "auto")
