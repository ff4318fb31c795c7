"""Sums by push on GPUs, with boards in GPU memory and in host memory, eagerly and in graphs. Needs no vLLM.

With one GPU, two ranks share it. Their kernels then take turns, which is slow, and correct all the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastattention_vllm.parallel.push_sums import SIZES, limit
from tests.gpu import push_tasks
from tests.parallel.ranks import Ranks

RANKS = min(4, max(2, torch.cuda.device_count()))
LENGTHS = [4, 5120, 4096, 65536, 8]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(RANKS) as started:
        for peer_to_peer in (False, True):
            started.run(push_tasks.open_sums, peer_to_peer)
        yield started


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("peer_to_peer", [True, False], ids=["peer-to-peer", "host-memory"])
def test_the_self_test_passes(peer_to_peer: bool, dtype: torch.dtype, ranks: Ranks) -> None:
    assert ranks.run(push_tasks.works, peer_to_peer, dtype) == [True] * RANKS


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("peer_to_peer", [True, False], ids=["peer-to-peer", "host-memory"])
def test_sums_are_exact(peer_to_peer: bool, graph: bool, ranks: Ranks) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert ranks.run(push_tasks.sums, peer_to_peer, LENGTHS, dtype, graph) == [True] * RANKS


@pytest.mark.parametrize("peer_to_peer", [True, False], ids=["peer-to-peer", "host-memory"])
def test_all_ranks_measure_the_same(peer_to_peer: bool, ranks: Ranks) -> None:
    first, *others = ranks.run(push_tasks.measured, peer_to_peer)
    assert all(other == first for other in others)
    assert tuple(one.bytes for one in first) == SIZES
    assert all(0 < one.seconds < 0.1 and 0 < one.peer_seconds < 0.1 for one in first)
    assert limit(first) in (0, *SIZES)
