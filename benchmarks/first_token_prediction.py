"""Predictions of the time to the first token on 2, 4 and 8 devices, from parts measured on two ranks without an engine.

Used by: first_token.py.

parallel/plan.py computes the time of a layer from the matmuls of such a rank and the sums of two ranks. A sum over
n ranks is modelled as a ring: 2 (n - 1) / n times the bytes of its rows in 2 (n - 1) steps. The rest of a step is the
time that engines on 1 and 2 GPUs took beyond that without tiling: a part that is the same on every rank, and a part
that is divided among the ranks. "full" hides sums behind gate_up_proj and down_proj, but not behind attention.
Predictions for 2 devices are printed next to the measurements and show how good the predictions are.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from first_token_engines import MODELS, TINY
from tiling_ranks import LINKS, collectives_of, join

from fastattention_vllm.bench import ranks as rank_processes
from fastattention_vllm.parallel import calibrate
from fastattention_vllm.parallel.layer_timer import LayerTimer
from fastattention_vllm.parallel.pipeline import Pipeline, Times
from fastattention_vllm.parallel.plan import even, plan

PREDICTED = (2, 4, 8)


@dataclass(frozen=True)
class Parts:
    """Times of parts of one layer, without an engine."""

    matmul: Mapping[tuple[str, int], Times]
    """By o_proj, down_proj or gate_up, and by number of ranks: the matmul of one rank."""
    sums: Mapping[str, Times]
    """Sums of two ranks, by collective; the first is the one that is used without tiling."""
    slowdown: Mapping[str, float]
    """The factor by which matmul and sum slow down when they run concurrently."""


def over(ranks: int, of_two: Times) -> Times:
    """Sums over n = ``ranks`` from those over two, as in a ring: 2 (n - 1) / n times the bytes in 2 (n - 1) steps.

    The time of a sum without rows is taken as the time of its steps.
    """
    points = of_two.points
    per_row = (points[-1][1] - points[0][1]) / max(1, points[-1][0] - points[0][0])
    step = max(0.0, points[0][1] - per_row * points[0][0])
    steps, volume = ranks - 1, 2 * (ranks - 1) / ranks
    return Times.measured([(rows, step * steps + max(0.0, seconds - step) * volume) for rows, seconds in points])


def predicted(parts: Parts, measured: Mapping[int, float], layers: int, tokens: int, ranks: int) -> dict[str, float]:
    """Seconds to the first token, by variant.

    Args:
        measured: Seconds without tiling by number of ranks, for 1 and perhaps 2.
    """
    linear = ("o_proj", "down_proj")

    def tiled(count: int) -> float:
        """The row-parallel layers of a step, each followed by its sum."""
        plain_sum = over(count, next(iter(parts.sums.values())))(tokens) if count > 1 else 0.0
        return layers * sum(parts.matmul[name, count](tokens) + plain_sum for name in linear)

    rest = measured[1] - tiled(1)
    divided = min(rest, 2 * (rest - (measured[2] - tiled(2)))) if 2 in measured else rest
    sums = {collective: over(ranks, times) for collective, times in parts.sums.items()}

    def saved(matmul: Times) -> float:
        cuts = [
            plan(tokens, Pipeline(matmul, times, parts.slowdown[collective], parts.slowdown[collective])).seconds
            for collective, times in sums.items()
        ]
        return max(0.0, matmul(tokens) + next(iter(sums.values()))(tokens) - min(cuts))

    o, down = (parts.matmul[name, ranks] for name in linear)
    off = rest - divided + divided / ranks + tiled(ranks)
    mlp = together(parts.matmul["gate_up", ranks], down)
    return {
        "off": off,
        "auto": off - layers * (saved(o) + saved(down)),
        "full": off - layers * (saved(o) + saved(mlp)),
    }


def together(one: Times, other: Times) -> Times:
    """Times of several functions in sequence, measured at the same numbers of rows."""
    return Times.measured([(rows, seconds + other(rows)) for rows, seconds in one.points])


def measured_parts(link: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Results of :func:`measure_parts` on two ranks; None if the ranks did not finish."""
    found: list[dict[str, Any]] = []
    if not rank_processes.run(measure_parts, 2, (link, options), LINKS[link], options.limit, found.append):
        print(f"first_token: the parts of a layer were not measured within {options.limit:.0f} s.", flush=True)
        return None
    (row,) = [one for one in found if "sums" in one]
    return row


def parts_of(raw: Mapping[str, Any]) -> Parts:
    def times(points: Sequence[Sequence[float]]) -> Times:
        return Times.measured([(int(rows), seconds) for rows, seconds in points])

    return Parts(
        {(name, ranks): times(points) for name, ranks, points in raw["matmul"]},
        {collective: times(points) for collective, points in raw["sums"]},
        dict(raw["slowdown"]),
    )


def measure_parts(rank: int, folder: str, said: tuple[str, argparse.Namespace]) -> None:
    """Runs on each rank."""
    link, options = said
    here = join(rank, folder, link, collectives_of(link), 2)
    shape = TINY if options.tiny else MODELS[options.model]
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    attended = shape["num_attention_heads"] * shape["head_dim"]
    numbers = [rows for rows in calibrate.row_counts(options.tokens) if rows <= options.tokens]
    dtype = torch.float32 if here.device == "cpu" else torch.float16
    matmuls = []
    for ranks in (1, *PREDICTED):
        shapes = {"o_proj": (hidden, attended // ranks), "down_proj": (hidden, wide // ranks)}
        for name, size in (shapes | {"gate_up": (2 * wide // ranks, hidden)}).items():
            weight = torch.empty(*size, dtype=dtype, device=here.device).uniform_(-1, 1)
            timer = LayerTimer(here.collectives, rank_processes.plain_layer, weight, options.tokens)
            seconds = timer.seconds([timer.matmul(rows) for rows in numbers], 3)
            matmuls.append((name, ranks, list(zip(numbers, seconds, strict=True))))
            if (name, ranks) == ("down_proj", 2):
                matmul = Times.measured(matmuls[-1][2])
                sums, slow = [], []
                blocks = even(options.tokens, 4)
                for collective in here.collectives:
                    seconds = timer.seconds([timer.all_reduce(collective, rows) for rows in numbers], 3)
                    sums.append((collective, list(zip(numbers, seconds, strict=True))))
                    alone = Times.measured(sums[-1][1])
                    (took,) = timer.seconds([timer.cut(collective, blocks)])
                    part = took / (matmul(options.tokens) + alone(options.tokens))
                    slow.append((collective, calibrate.slowdown(matmul, alone, blocks, part)))
    here.tell({"matmul": matmuls, "sums": sums, "slowdown": slow})
    rank_processes.leave(here)
