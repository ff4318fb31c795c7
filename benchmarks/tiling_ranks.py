"""Shared parts of the tiling benchmarks: links between ranks, running all ranks, and the report of their results.

Used by: tiling_all_reduce.py, tiling_layer.py and first_token.py.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastattention_vllm.bench import machine, ranks
from fastattention_vllm.bench.ranks import RankContext
from fastattention_vllm.bench.report import Row, compared, report
from fastattention_vllm.parallel.named_collectives import DEFAULT_COLLECTIVES

LINKS = {"nvlink": {}, "host": {"NCCL_P2P_DISABLE": "1"}, "gloo": {"GLOO_SOCKET_IFNAME": "lo"}}
Told = dict[str, Any]
"""A result of a rank: numbers by name."""


def why_not(links: Sequence[str], ranks: int) -> str | None:
    """Why nothing can be measured over ``links``, in one sentence."""
    there = torch.cuda.device_count()
    if set(links) <= {"gloo"} or there >= ranks:
        return None
    return f"{ranks} ranks need as many NVIDIA GPUs, torch can use {there} here; `--links gloo` needs none."


def run_all(
    work: Callable[[int, str, Any], None],
    describe: Callable[[Told, Sequence[Told]], Row],
    options: argparse.Namespace,
) -> tuple[bool, list[Told]]:
    """Run ``work(rank, folder, (link, options))`` on all ranks, for each link, and write their results.

    Args:
        describe: Makes a result's row from the result and all earlier ones.

    Returns:
        Whether all ranks finished, and their results.
    """
    told: list[Told] = []
    rows: list[Row] = []
    complete = True

    def see(one: Told) -> None:
        print(json.dumps(one), flush=True)
        rows.append(describe(one, told))
        told.append(one)

    for link in options.links:
        complete &= ranks.run(work, options.ranks, (link, options), LINKS[link], options.limit, see)
        if options.json:
            report(rows, hardware(link), complete=complete).write(options.json)
    return complete, told


def time_row(case: str, metric: str, milliseconds: float, peer: float | None, limit: float | None, told: Told) -> Row:
    """A row for a time. The peer is the plain variant."""
    peer_name = None if peer is None else "plain"
    return compared(
        case, metric, "ms", milliseconds, better="lower", peer_name=peer_name, peer=peer, limit=limit, **told
    )


def collectives_of(link: str) -> list[str]:
    return DEFAULT_COLLECTIVES["cpu" if link == "gloo" else "cuda"]


def join(rank: int, folder: str, link: str, names: Sequence[str], size: int) -> RankContext:
    device = "cpu" if link == "gloo" else "cuda"
    return ranks.join(rank, folder, size, device, names, lambda sentence: {"link": link, "note": sentence})


def difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference of two ``[rows, numbers]``, relative to the largest expected number of its row."""
    return ((expected - found).abs().amax(1) / expected.abs().amax(1).clamp_min(1e-20)).max().item()


def hardware(link: str) -> str:
    host = machine.hardware(len(os.sched_getaffinity(0)))
    return host if link == "gloo" else f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}; {host}"
