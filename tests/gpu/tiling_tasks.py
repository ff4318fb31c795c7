"""Tasks for ranks with one GPU each (see tests/parallel/ranks.py). They run in the ranks' processes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fastattention_vllm.parallel import tiled_linear
from fastattention_vllm.parallel.collective import Collective
from fastattention_vllm.parallel.named_collectives import open_named_collectives
from fastattention_vllm.parallel.plan import even
from tests.parallel.tasks import TilingBy, exchange

GROUP = "gpu test"
COLLECTIVES: dict[str, Collective] = {}


def open_all(rank: int, names: list[str], peer_to_peer: bool) -> list[str]:
    """Open all collectives; returns a sentence about each one that is not available."""
    import os

    if not peer_to_peer:
        os.environ["NCCL_P2P_DISABLE"] = "1"
    torch.cuda.set_device(rank)
    problems: list[str] = []
    everyone = [list(range(dist.get_world_size()))]
    COLLECTIVES.update(open_named_collectives(names, everyone, rank, "cuda", 60.0, exchange, problems.append))
    return problems


def sums(rank: int, name: str, sizes: list[int], dtype: torch.dtype) -> bool:
    """Whether concurrent block sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    blocks = [torch.randint(-9, 10, (size,), generator=generator).to(dtype) for size in sizes]
    there = [block.cuda() for block in blocks]
    started = [COLLECTIVES[name].start(block) for block in there]
    for one in started:
        COLLECTIVES[name].wait(one)
    for block in blocks:
        dist.all_reduce(block)
    return all(torch.equal(one.cpu(), other) for one, other in zip(there, blocks, strict=True))


def layer(rank: int, name: str, rows: int, count: int, graph: bool) -> float:
    """The largest difference between the op and float64, relative to the largest number."""
    collective = COLLECTIVES[name]
    tiled_linear.register(GROUP, TilingBy(collective, lambda rows, weight: even(rows, count), _never))
    generator = torch.Generator().manual_seed(rank)
    weight = torch.randn((512, 768), generator=generator).half()
    bias = torch.arange(512).half() / 64
    x = torch.empty((rows, 768), dtype=torch.float16, device="cuda")
    arguments = weight.cuda(), bias.cuda(), GROUP
    replay = None
    if graph:
        x.zero_()
        # the first use creates things that must not be created in a graph
        tiled_linear.tiled_linear_all_reduce(x, *arguments)
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
            answer = tiled_linear.tiled_linear_all_reduce(x, *arguments)
        replay = recorded
    worst = 0.0
    for _ in range(3):
        numbers = torch.randn((rows, 768), generator=generator).half()
        x.copy_(numbers)
        if replay is not None:
            replay.replay()
            found = answer
        else:
            found = tiled_linear.tiled_linear_all_reduce(x, *arguments)
        expected = numbers.double() @ weight.double().t()
        dist.all_reduce(expected)
        expected += bias.double()
        worst = max(worst, ((found.cpu().double() - expected).abs().max() / expected.abs().max()).item())
    return worst


def _never(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    raise AssertionError("must not be called for one block")
