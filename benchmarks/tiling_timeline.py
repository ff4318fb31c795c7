"""When each block is computed and when it is summed, as a timeline and as a picture.

Used by: tiling_all_reduce.py.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fastattention_vllm.parallel.collective import Collective
from fastattention_vllm.parallel.layer_timer import LayerTimer


def timeline(timer: LayerTimer, collective: Collective, blocks: Sequence[int]) -> dict[str, list[tuple[float, float]]]:
    """(begin, end) in ms of each block's matmul and sum, as measured on this rank.

    A sum begins when its matmul and the previous sum have ended.
    """
    rows = sum(blocks)
    clock = _GpuClock() if timer.weight.is_cuda else _Clock()
    for _ in range(3):  # the last one is used
        out = timer.out[:rows]
        begins, ends, sums, started, begin = [], [], [], [], 0
        timer.first.wait(timer.first.start(out[:1]))
        clock.head_start()
        origin = clock.now()
        for count in blocks:
            part = slice(begin, begin + count)
            begins.append(clock.now())
            torch.mm(timer.x[part], timer.weight.t(), out=out[part])
            ends.append(clock.now())
            started.append(collective.start(out[part]))
            sums.append(clock.when(lambda one=started[-1]: collective.wait(one)))
            begin += count
        for one in started:
            collective.wait(one)
    times = [clock.milliseconds(origin, marks) for marks in (begins, ends, sums)]
    matmuls = list(zip(times[0], times[1], strict=True))
    reduces = [
        (max(ready, before), end) for ready, before, end in zip(times[1], [0.0, *times[2][:-1]], times[2], strict=True)
    ]
    return {"matmul": matmuls, "all-reduce": reduces}


class _Clock:
    """A CPU's clock. A thread waits for a sum and notes when it ends."""

    def head_start(self) -> None:
        pass

    def now(self) -> Any:
        return [time.perf_counter()]

    def when(self, wait: Callable[[], object]) -> Any:
        mark: list[float] = []
        thread = threading.Thread(target=lambda: (wait(), mark.append(time.perf_counter())))
        thread.start()
        return [mark, thread]

    def milliseconds(self, origin: Any, marks: list[Any]) -> list[float]:
        found = []
        for mark in marks:
            if isinstance(mark[0], list):
                mark[1].join()
                mark = mark[0]
            found.append(1e3 * (mark[0] - origin[0]))
        return found


class _GpuClock:
    """A GPU's clock by events. A separate stream waits for a sum and marks when it ends."""

    def __init__(self) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(16)]
        self.turns = itertools.cycle(self.streams)

    def head_start(self) -> None:
        torch.cuda._sleep(2_000_000)

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def when(self, wait: Callable[[], object]) -> Any:
        with torch.cuda.stream(next(self.turns)):
            wait()
            return self.now()

    def milliseconds(self, origin: Any, marks: list[Any]) -> list[float]:
        torch.cuda.synchronize()
        return [origin.elapsed_time(mark) for mark in marks]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The timelines of ``rows``, one below the other, each with a line for matmuls and one for sums."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    chosen = [row for row in rows if "timeline" in row]
    if not chosen:
        sys.exit("tiling_all_reduce: no timeline in these rows.")
    figure, axes = plt.subplots(len(chosen), 1, figsize=(10, 1.7 * len(chosen)), squeeze=False, layout="constrained")
    for axis, row in zip(axes[:, 0], chosen, strict=True):
        for height, (stage, color) in enumerate({"all-reduce": "#c95f3c", "matmul": "#3c6fc9"}.items()):
            for at, (begin, end) in enumerate(row["timeline"][stage]):
                axis.barh(
                    height,
                    end - begin,
                    left=begin,
                    height=0.8,
                    color=color,
                    edgecolor="white",
                    alpha=1 - 0.4 * (at % 2),
                )
        same = [
            other
            for other in rows
            if other.get("way") == "plain"
            and all(other[key] == row[key] for key in ("link", "ranks", "model", "layer", "tokens"))
        ]
        for other in same:
            axis.axvline(other["ms"], color="black", linestyle="--", linewidth=1)
        axis.set_yticks([0, 1], ["communication", "computation"])
        axis.set_xlim(left=0)
        axis.set_title(
            f"{row['model']} {row['layer']}, {row['tokens']} tokens, {row['ranks']} ranks, {row['link']}, "
            f"{row['lane']}; dashed: the plain layer",
            fontsize=9,
        )
    axes[-1, 0].set_xlabel("ms")
    figure.savefig(path, dpi=110)
