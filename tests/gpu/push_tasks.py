"""Tasks for ranks that sum by push (see tests/parallel/ranks.py). They run in the ranks' processes."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from fastattention_vllm.parallel import push_sums
from fastattention_vllm.parallel.push_sums import PushSums, Timed
from tests.parallel.tasks import exchange

OPEN: dict[bool, PushSums] = {}


def open_sums(rank: int, peer_to_peer: bool) -> None:
    """Ranks share GPUs if there are too few. Sums then take turns with the other rank's kernel."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    OPEN[peer_to_peer] = PushSums(rank, dist.get_world_size(), exchange, peer_to_peer)


def works(rank: int, peer_to_peer: bool, dtype: torch.dtype) -> bool:
    return OPEN[peer_to_peer].works(dtype, exchange)


def sums(rank: int, peer_to_peer: bool, lengths: list[int], dtype: torch.dtype, graph: bool) -> bool:
    """Whether sums of several lengths are right, bit for bit, in one graph that is replayed with other numbers."""
    push = OPEN[peer_to_peer]
    there = [torch.zeros(length, dtype=dtype, device="cuda") for length in lengths]
    recorded = None
    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
            found = [push.sum(x) for x in there]
    right = True
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        parts = [[torch.randn(n, generator=random).to(dtype) for n in lengths] for _ in range(push.ranks)]
        for x, part in zip(there, parts[rank], strict=True):
            x.copy_(part)
        if recorded is None:
            found = [push.sum(x) for x in there]
        else:
            recorded.replay()
        for at, one in enumerate(found):
            expected = functools.reduce(torch.add, (of_rank[at].float() for of_rank in parts)).to(dtype)
            right &= torch.equal(one.cpu(), expected)
    return right


def measured(rank: int, peer_to_peer: bool) -> list[Timed]:
    """Push beside itself."""
    push = OPEN[peer_to_peer]
    return push_sums.measure(push, push.sum, torch.float16, exchange)
