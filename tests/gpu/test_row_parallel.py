"""Tiling-AllReduce on two GPUs: sums by NCCL and by copy engines, eagerly and in graphs, and the same answers of vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import reference_models as reference
from tests.gpu import tiling_tasks
from tests.gpu.test_engine import Steps, answers, check
from tests.parallel.ranks import Ranks
from tests.reference_models import save_random

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

LANES = ["nccl", "nccl:4", "copies:2x1"]
LEAST = 128


@pytest.fixture(scope="module", params=[True, False], ids=["peer-to-peer", "host-memory"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(2) as started:
        for problems in started.run(tiling_tasks.open_all, LANES, request.param):
            assert problems == []
        yield started


@pytest.mark.parametrize("lane", LANES)
def test_blocks_are_summed_exactly(lane: str, ranks: Ranks) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert ranks.run(tiling_tasks.sums, lane, [1, 300_001, 4_000_000, 128], dtype) == [True, True]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("lane", LANES)
def test_a_layer_is_summed(lane: str, graph: bool, ranks: Ranks) -> None:
    """fp16 has 11 bits, and each rank rounds its part."""
    for rows, count in ((1000, 4), (4096, 2)):
        for error in ranks.run(tiling_tasks.layer, lane, rows, count, graph):
            assert error < 2**-10


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
@pytest.mark.parametrize("blocks", [3, "auto"])
def test_answers_are_those_without(
    blocks: Any,
    eager: bool,
    model: Path,
    expected: Callable[[bool], list[Steps]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With graphs, those of up to 512 tokens have tiled layers in them."""
    wanted = expected(eager)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    capfd.readouterr()
    section = {"host_kv_layers": 0, "tiling_all_reduce": blocks, "tiling_min_tokens": LEAST}
    check(answers(model, enforce_eager=eager, additional_config={"fastattention": section}, **CHANGES), wanted)
    captured = capfd.readouterr()
    log = captured.out + captured.err
    assert "Tiling-AllReduce: 6 row-parallel layers in" in log
    assert ("measuring a layer" in log) == (blocks == "auto")
