"""Predictions of the time to the first token on 2, 4 and 8 devices, from parts measured without an engine.

Used by: first_token.py.

parallel/plan.py computes the time of a layer from the matmuls of such a rank and the sums of as many ranks. Sums of
more ranks than could be measured are modelled as a ring: 2 (n - 1) / n times the bytes of its rows in 2 (n - 1) steps.
One more sum is that of the embeddings. The rest of a step is the time that engines on 1 and 2 GPUs took beyond that
without tiling: a part that is the same on every rank, and a part that is divided among the ranks. "full" hides sums
behind gate_up_proj and down_proj, but not behind attention. Predictions for numbers of devices that were measured are
printed next to the measurements and show how good the predictions are.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
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
    sums: Mapping[tuple[str, int], Times]
    """By collective and number of ranks; the first collective is the one that is used without tiling."""
    slowdown: Mapping[tuple[str, int], float]
    """The factor by which matmul and sum slow down when they run concurrently."""

    def of(self, ranks: int) -> dict[str, tuple[Times, float]]:
        """By collective: the times of its sums over this many ranks, and its slowdown.

        Where they were not measured, they are predicted from those of the largest smaller number.
        """
        found = {}
        for collective in dict.fromkeys(name for name, _ in self.sums):
            base = max(size for name, size in self.sums if name == collective and size <= ranks)
            sums, slow = self.sums[collective, base], self.slowdown[collective, base]
            found[collective] = over(ranks, sums, base), slow
        return found


def over(ranks: int, sums: Times, base: int = 2) -> Times:
    """Sums over n = ``ranks`` from those over ``base``, as in a ring: 2 (n - 1) / n times the bytes in 2 (n - 1) steps.

    The time of a sum without rows is taken as the time of its steps.
    """
    points = sums.points
    per_row = (points[-1][1] - points[0][1]) / max(1, points[-1][0] - points[0][0])
    step = max(0.0, points[0][1] - per_row * points[0][0])
    steps, volume = (ranks - 1) / (base - 1), (1 - 1 / ranks) / (1 - 1 / base)
    return Times.measured([(rows, step * steps + max(0.0, seconds - step) * volume) for rows, seconds in points])


def predicted(parts: Parts, measured: Mapping[int, float], layers: int, tokens: int, ranks: int) -> dict[str, float]:
    """Seconds to the first token, by variant.

    Args:
        measured: Seconds without tiling by number of ranks, for 1 and perhaps 2.
    """
    linear = ("o_proj", "down_proj")

    def known(count: int) -> float:
        """The sum of the embeddings, and the row-parallel layers of a step, each followed by its sum."""
        plain_sum = next(iter(parts.of(count).values()))[0](tokens) if count > 1 else 0.0
        return plain_sum + layers * sum(parts.matmul[name, count](tokens) + plain_sum for name in linear)

    rest = measured[1] - known(1)
    divided = min(rest, 2 * (rest - (measured[2] - known(2)))) if 2 in measured else rest
    sums = parts.of(ranks)

    def saved(matmul: Times) -> float:
        cuts = [plan(tokens, Pipeline(matmul, times, slow, slow)).seconds for times, slow in sums.values()]
        return max(0.0, matmul(tokens) + next(iter(sums.values()))[0](tokens) - min(cuts))

    o, down = (parts.matmul[name, ranks] for name in linear)
    off = rest - divided + divided / ranks + known(ranks)
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
    """Results of :func:`measure_parts` on two ranks and on each larger number; None if the ranks did not finish."""
    found: dict[str, Any] = {"matmul": [], "sums": [], "slowdown": []}
    for size in sorted({2, *(ranks for ranks in options.ranks if ranks > 2)}):
        told: list[dict[str, Any]] = []
        if not rank_processes.run(measure_parts, size, (link, options, size), LINKS[link], options.limit, told.append):
            print(
                f"first_token: the parts of a layer were not measured on {size} ranks within {options.limit:.0f} s.",
                flush=True,
            )
            return None
        (row,) = [one for one in told if "sums" in one]
        for name, rows in found.items():
            rows += row[name]
    return found


def parts_of(raw: Mapping[str, Any]) -> Parts:
    """From the ``parts`` of a report. Reports until 2026-11-26 have sums of two ranks only, in another form."""

    def times(points: Sequence[Sequence[float]]) -> Times:
        return Times.measured([(int(rows), seconds) for rows, seconds in points])

    return Parts(
        {(name, ranks): times(points) for name, ranks, points in raw["matmul"]},
        {(collective, ranks): times(points) for collective, ranks, points in raw["sums"]},
        {(collective, ranks): slow for collective, ranks, slow in raw["slowdown"]},
    )


def measure_parts(rank: int, folder: str, said: tuple[str, argparse.Namespace, int]) -> None:
    """Runs on each rank. Sums are over this run's ranks; two ranks also time the matmuls of all numbers of ranks."""
    link, options, size = said
    here = join(rank, folder, link, collectives_of(link), size)
    shape = TINY if options.tiny else MODELS[options.model]
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    attended = shape["num_attention_heads"] * shape["head_dim"]
    numbers = [rows for rows in calibrate.row_counts(options.tokens) if rows <= options.tokens]
    dtype = torch.float32 if here.device == "cpu" else torch.float16

    def timer_of(outputs: int, inputs: int) -> LayerTimer:
        weight = torch.empty(outputs, inputs, dtype=dtype, device=here.device).uniform_(-1, 1)
        return LayerTimer(here.collectives, rank_processes.plain_layer, weight, options.tokens)

    def points(timer: LayerTimer, work: Callable[[int], Callable[[], object]]) -> list[tuple[int, float]]:
        return list(zip(numbers, timer.seconds([work(rows) for rows in numbers], 3), strict=True))

    matmuls = []
    for ranks in (1, *PREDICTED) if size == 2 else ():
        shapes = {"o_proj": (hidden, attended // ranks), "down_proj": (hidden, wide // ranks)}
        for name, (outputs, inputs) in (shapes | {"gate_up": (2 * wide // ranks, hidden)}).items():
            timer = timer_of(outputs, inputs)
            matmuls.append((name, ranks, points(timer, timer.matmul)))
    timer, blocks = timer_of(hidden, wide // size), even(options.tokens, 4)
    matmul = Times.measured(points(timer, timer.matmul))
    sums, slow = [], []
    for collective in here.collectives:
        sums.append((collective, size, points(timer, functools.partial(timer.all_reduce, collective))))
        alone = Times.measured(sums[-1][2])
        (took,) = timer.seconds([timer.cut(collective, blocks)])
        part = took / (matmul(options.tokens) + alone(options.tokens))
        slow.append((collective, size, calibrate.slowdown(matmul, alone, blocks, part)))
    here.tell({"matmul": matmuls, "sums": sums, "slowdown": slow})
    rank_processes.leave(here)
