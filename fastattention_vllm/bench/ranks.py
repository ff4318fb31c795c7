"""Ranks of one machine in processes of their own, for what measures without a server: benchmarks and the doctor.

Used by: benchmarks/tiling_ranks.py, benchmarks/first_token_prediction.py and fastattention_vllm/doctor.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastattention_vllm.parallel.collective import Collective
from fastattention_vllm.parallel.named_collectives import open_named_collectives

TIMEOUT = 60.0
"""Seconds that a rank waits for another."""

Row = dict[str, Any]
Work = Callable[[int, str, Any], None]
"""Rank, folder and whatever the caller wants to say; calls :func:`join` and :func:`leave`. Of a module, so that another
process finds it."""


@dataclass
class RankContext:
    """What a rank has."""

    rank: int
    size: int
    device: str
    collectives: dict[str, Collective]
    tell: Callable[[Row], None]
    """Hand a row to whoever called :func:`run`; done by the first rank alone."""
    exchange: Callable[[Any], list[Any]]


def run(
    work: Work, size: int, said: Any, environment: Mapping[str, str], limit: float, see: Callable[[Row], object]
) -> bool:
    """``work`` on ``size`` ranks; whether all of them came to their end within ``limit`` seconds.

    Args:
        environment: variables for the ranks alone.
        see: called with each row that the first rank tells, as they come.
    """
    spawn = multiprocessing.get_context("spawn")
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(environment)
        try:
            processes = [spawn.Process(target=work, args=(rank, folder, said)) for rank in range(size)]
            for process in processes:
                process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        until, seen, rows = time.monotonic() + limit, 0, Path(folder) / "rows"
        running = True
        while running:
            running = any(process.is_alive() for process in processes) and time.monotonic() < until
            if any(process.exitcode not in (None, 0) for process in processes):
                running = False  # the others would wait for it
            if running:
                time.sleep(0.2)
            lines = rows.read_text().splitlines() if rows.exists() else []
            for line in lines[seen:]:
                see(json.loads(line))
            seen = len(lines)
        good = all(process.exitcode == 0 for process in processes)
        for process in processes:
            process.kill()
            process.join()
    return good


def join(
    rank: int, folder: str, size: int, device: str, collectives: Sequence[str], complain: Callable[[str], Row]
) -> RankContext:
    """Begin as one rank.

    Args:
        device: "cuda", where the rank takes the GPU of its number, or "cpu", where it takes one thread.
        collectives: names, see ``open_named_collectives``.
        complain: makes a row of a sentence about one that cannot be had.
    """
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=TIMEOUT)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=limit)
    talk = dist.new_group(backend="gloo")

    def exchange(value: Any) -> list[Any]:
        found: list[Any] = [None] * size
        dist.all_gather_object(found, value, group=talk)
        return found

    def tell(row: Row) -> None:
        if rank == 0:
            with open(f"{folder}/rows", "a") as file:
                file.write(json.dumps(row) + "\n")

    names = collectives if size > 1 else collectives[:1]
    everyone = [list(range(size))]
    opened = open_named_collectives(
        names, everyone, rank, device, TIMEOUT, exchange, lambda sentence: tell(complain(sentence))
    )
    return RankContext(rank, size, device, opened, tell, exchange)


def leave(context: RankContext) -> None:
    """End this process: communicators and shared memory go with it, whatever state they are in."""
    context.exchange(None)
    os._exit(0)


def plain_layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As vLLM's RowParallelLinear does it: one matmul, then one all-reduce over all ranks."""
    out = torch.nn.functional.linear(x, weight, bias)
    dist.all_reduce(out)
    return out
