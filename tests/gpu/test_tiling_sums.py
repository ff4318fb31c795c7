"""Block sums on two and four GPUs, by NCCL and by copy engines, eagerly and in graphs. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu import tiling_tasks
from tests.parallel.ranks import Ranks

COLLECTIVES = ["nccl", "nccl:4", "copies:2x1"]


@pytest.fixture(scope="module", params=[2, 4], ids=["two_gpus", "four_gpus"])
def size(request: pytest.FixtureRequest) -> int:
    """The number of ranks."""
    gpus: int = request.param
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    return gpus


@pytest.fixture(scope="module", params=[True, False], ids=["peer-to-peer", "host-memory"])
def ranks(size: int, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(size) as started:
        for problems in started.run(tiling_tasks.open_all, COLLECTIVES, request.param):
            assert problems == []
        yield started


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_blocks_are_summed_exactly(collective: str, size: int, ranks: Ranks) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert ranks.run(tiling_tasks.sums, collective, [1, 300_001, 4_000_000, 128], dtype) == [True] * size


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_layer_is_summed(collective: str, graph: bool, size: int, ranks: Ranks) -> None:
    """fp16 has 11 bits. Each rank rounds its part, and each addition rounds once."""
    for rows, count in ((1000, 4), (4096, 2)):
        for error in ranks.run(tiling_tasks.layer, collective, rows, count, graph):
            assert error < size * 2**-11
