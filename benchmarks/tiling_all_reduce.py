"""Row-parallel linear layers of 8B and 70B models in blocks, against the plain layer: what is hidden, what is lost.

    python benchmarks/tiling_all_reduce.py --ranks 2 --links nvlink host --json FILE     # on GPUs of one machine
    python benchmarks/tiling_all_reduce.py --ranks 2 --links gloo --tiny --json FILE     # anywhere
    python benchmarks/tiling_all_reduce.py --draw FILE --timeline PICTURE                # from what a run has found

"host" sets NCCL_P2P_DISABLE=1: all bytes between GPUs pass through host memory, as between V100s on PCIe without P2P.
A row is a layer, a number of tokens and a way: "plain" (matmul, then NCCL's all-reduce), "auto" (what
`tiling_all_reduce: "auto"` does, after its own calibration), "2", "4" and "8" (as many equal blocks). Times are medians
of rounds in which all ways take turns, the mean of the ranks, by events on the GPU. "hidden" is (matmul + all-reduce -
time) / min(matmul, all-reduce), both alone and of the plain layer; "speedup" is plain / time. "ordering ms" is what
Python takes to order it, which the times are free of. Each way's result is compared with the plain layer's.
`--sweep COLLECTIVE...` times cuts by each of these collectives (see parallel/named_collectives.py) instead.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastattention_vllm.bench import machine, ranks
from fastattention_vllm.bench.ranks import RankContext, plain_layer
from fastattention_vllm.bench.saved_report import saved_report
from fastattention_vllm.parallel import calibrate
from fastattention_vllm.parallel.collective import Collective
from fastattention_vllm.parallel.layer_timer import LayerTimer
from fastattention_vllm.parallel.named_collectives import DEFAULT_COLLECTIVES
from fastattention_vllm.parallel.plan import cut, even

LAYERS = {  # model: layer: (inputs of all ranks, outputs)
    "8B": {"o_proj": (4096, 4096), "down_proj": (14336, 4096)},
    "70B": {"o_proj": (8192, 8192), "down_proj": (28672, 8192)},
}
TINY = {"tiny": {"o_proj": (64, 32)}}
TOKENS = [256 << i for i in range(8)]
LINKS = {"nvlink": {}, "host": {"NCCL_P2P_DISABLE": "1"}, "gloo": {"GLOO_SOCKET_IFNAME": "lo"}}
FIXED = (2, 4, 8)
SHAPES = {  # of a sweep's cuts
    "even 2": [1, 1],
    "even 4": [1] * 4,
    "even 8": [1] * 8,
    "growing": [1, 3, 12],
    "small first": [1, 5, 5, 5],
    "small last": [5, 5, 5, 1],
}
WORST = 1e-2
"""Largest difference to the plain layer, as a part of its largest number, before the run is given up."""
SHORT = 2048
"""Up to so many tokens there are three times as many rounds: what takes a tenth of a millisecond varies more."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=["nvlink", "host"])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--min-tokens", type=int, default=2048, help="auto cuts none below")
    parser.add_argument("--collectives", nargs="+", help="for auto to choose from")
    parser.add_argument(
        "--sweep", nargs="+", metavar="COLLECTIVE", help="time cuts by each of these collectives instead"
    )
    parser.add_argument("--tiny", action="store_true", help="one small layer in fp32, to try the benchmark itself")
    parser.add_argument("--models", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for a link, after which it is ended")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--draw", type=saved_report, help="draw the timelines in this file of an earlier run, and end")
    parser.add_argument("--timeline", type=Path, help="picture of them")
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(options.draw.read_text())["rows"], options.timeline or options.draw.with_suffix(".png"))
        return 0
    if reason := why_not(options.links, options.ranks):
        print(f"tiling_all_reduce: {reason}", file=sys.stderr)
        return 2
    return 0 if run_all(work, fields, options) else 1


def why_not(links: Sequence[str], ranks: int) -> str | None:
    """Why nothing can be measured over ``links``, in one sentence."""
    there = torch.cuda.device_count()
    if set(links) <= {"gloo"} or there >= ranks:
        return None
    return f"{ranks} ranks need as many NVIDIA GPUs, torch can use {there} here; `--links gloo` needs none."


def run_all(
    work: Callable[[int, str, Any], None],
    fields: Callable[[dict[str, Any], Sequence[dict[str, Any]]], dict[str, Any]],
    options: argparse.Namespace,
) -> bool:
    """``work(rank, folder, (link, options))`` on all ranks, for each link; rows go into the file, each with its
    ``fields(row, rows before it)``. Whether all ended."""
    rows: list[dict[str, Any]] = []
    complete = True

    def see(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        rows.append(row | fields(row, rows))

    for link in options.links:
        complete &= ranks.run(work, options.ranks, (link, options), LINKS[link], options.limit, see)
        if options.json:
            report = {
                "hardware": _hardware(link),
                "versions": machine.versions(),
                "date": datetime.date.today().isoformat(),
                "complete": complete,
                "rows": rows,
            }
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    if getattr(options, "timeline", None) and rows:
        draw(rows, options.timeline)
    return complete


def fields(row: dict[str, Any], before: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What rows of every result have. The peer is the plain layer of the same place, which stands in a row ``before``;
    nothing takes less time than the longer one of matmul and all-reduce."""
    if "note" in row:
        return result(row["note"], "overlap note", "", None)
    case = f"{row['model']} {row['layer']}, {row['ranks']} ranks, {row['link']}"
    if "chosen" in row:
        return result(case, "overlap calibration", "s", row["calibration seconds"])
    case = f"{row['tokens']} tokens, {case}"
    if "timeline" in row:
        return result(f"{case}, {row['lane']}", "overlap timeline", "ms", row["timeline"]["all-reduce"][-1][1])
    place = ("link", "ranks", "model", "layer", "tokens")
    plain = next(one for one in (row, *before) if "plain ms" in one and all(one[key] == row[key] for key in place))
    limit = max(plain["matmul ms"], plain["all-reduce ms"])
    if "way" in row:
        way, took = row["way"], row["ms"]
    elif "lane" in row:
        shape = min(SHAPES, key=lambda name: float(row[name]))
        way, took = f"{row['lane']}, the fastest cut: {shape}", row[shape]
    else:
        way, took = "plain", plain["plain ms"]
    peer = (None, None) if way == "plain" else ("plain", plain["plain ms"])
    return result(f"{case}, {way}", "overlap row-parallel layer", "ms", took, *peer, limit)


def result(
    case: str,
    metric: str,
    unit: str,
    ours: float | None,
    peer_name: str | None = None,
    peer: float | None = None,
    limit: float | None = None,
) -> dict[str, Any]:
    """Of times: ``ratio`` is above 1 where ours is less than the peer's."""
    return {
        "case": case,
        "metric": metric,
        "unit": unit,
        "ours": ours,
        "peer_name": peer_name,
        "peer": peer,
        "ratio": peer / ours if peer and ours else None,
        "limit": limit,
        "fraction_of_limit": limit / ours if limit and ours else None,
    }


def collectives_of(link: str) -> list[str]:
    return DEFAULT_COLLECTIVES["cpu" if link == "gloo" else "cuda"]


def join(rank: int, folder: str, link: str, names: Sequence[str], size: int) -> RankContext:
    device = "cpu" if link == "gloo" else "cuda"
    return ranks.join(rank, folder, size, device, names, lambda sentence: {"link": link, "note": sentence})


def work(rank: int, folder: str, said: tuple[str, argparse.Namespace]) -> None:
    """One rank."""
    link, options = said
    here = join(rank, folder, link, options.sweep or options.collectives or collectives_of(link), options.ranks)
    models = TINY if options.tiny else {name: LAYERS[name] for name in options.models}
    for model, layers in models.items():
        for layer, (inputs, outputs) in layers.items():
            place = {"link": link, "ranks": options.ranks, "model": model, "layer": layer}
            place |= {"inputs": inputs // options.ranks, "outputs": outputs}
            weight = torch.empty(
                outputs,
                inputs // options.ranks,
                dtype=torch.float32 if here.device == "cpu" else torch.float16,
                device=here.device,
            ).uniform_(-1, 1)
            measure = sweep if options.sweep else table
            measure(weight, here.collectives, place, options, here.tell)
    ranks.leave(here)


def table(
    weight: torch.Tensor,
    collectives: dict[str, Collective],
    place: dict[str, Any],
    options: argparse.Namespace,
    tell: Callable[[dict[str, Any]], None],
) -> None:
    maximum = max(options.tokens)
    began = time.perf_counter()
    choice = calibrate.measure(
        collectives,
        plain_layer,
        weight,
        min(options.min_tokens, maximum),
        maximum,
        say=lambda line: tell({"note": f"{line}, {time.perf_counter() - began:.1f} s"}),
    )
    seconds = time.perf_counter() - began
    tell(place | {"calibration seconds": seconds, "chosen": [(t.rows, t.collective, t.blocks) for t in choice.trials]})
    timer = LayerTimer(collectives, plain_layer, weight, maximum)
    first = next(iter(collectives))
    for tokens in options.tokens:
        name, blocks = choice.of(tokens) if tokens >= options.min_tokens else ("", (tokens,))
        ways: dict[str, tuple[str, Sequence[int]]] = {"auto": (name, blocks)}
        ways |= {str(count): (first, even(tokens, count)) for count in FIXED if len(even(tokens, count)) > 1}
        plain = plain_layer(timer.x[:tokens], weight, None)
        works = [timer.matmul(tokens), plain_sum(timer, tokens), timer.plain(tokens)]
        wrong = {}
        for way, (collective, cuts) in ways.items():
            work = timer.cut(collective, cuts) if collective else timer.plain(tokens)
            works.append(work)
            timer.out.zero_()
            result = work()
            wrong[way] = difference(plain, timer.out[:tokens] if result is None else result)
        rounds = options.rounds * (3 if tokens <= SHORT else 1)
        alone, sum_alone, *took = timer.timed(works, rounds)
        matmul, all_reduce, plain_seconds = alone.seconds, sum_alone.seconds, took[0].seconds
        for (way, (collective, cuts)), one in zip({"plain": ("", (tokens,)), **ways}.items(), took, strict=True):
            seconds = one.seconds
            row = place | {"tokens": tokens, "way": way, "lane": collective, "blocks": list(cuts), "ms": 1e3 * seconds}
            row["ordering ms"] = 1e3 * one.enqueue_seconds
            row |= {"matmul ms": 1e3 * matmul, "all-reduce ms": 1e3 * all_reduce, "plain ms": 1e3 * plain_seconds}
            row["hidden"] = (matmul + all_reduce - seconds) / min(matmul, all_reduce)
            row["speedup"] = plain_seconds / seconds
            row["error"] = wrong.get(way, 0.0)
            tell(row)
        if max(wrong.values()) > WORST:
            sys.exit(f"wrong by {wrong}")
        if (name and tokens == 8192) or options.tiny:
            name, cuts = (name, blocks) if name else (first, even(tokens, 2))
            found = timeline(timer, collectives[name], cuts)
            tell(place | {"tokens": tokens, "lane": name, "blocks": list(cuts), "timeline": found})


def sweep(
    weight: torch.Tensor,
    collectives: dict[str, Collective],
    place: dict[str, Any],
    options: argparse.Namespace,
    tell: Callable[[dict[str, Any]], None],
) -> None:
    """Each collective alone, and cuts of several shapes by it, with and without multiprocessors left free."""
    timer = LayerTimer(collectives, plain_layer, weight, max(options.tokens))
    for tokens in options.tokens:
        works = [timer.matmul(tokens), plain_sum(timer, tokens), timer.plain(tokens)]
        matmul, all_reduce, plain = timer.seconds(works, options.rounds)
        tell(
            place
            | {"tokens": tokens, "matmul ms": 1e3 * matmul, "all-reduce ms": 1e3 * all_reduce, "plain ms": 1e3 * plain}
        )
        for name, collective in collectives.items():
            cuts = {shape: cut(tokens, weights, 128) for shape, weights in SHAPES.items()}
            parts = [tokens, max(128, tokens // 8)]
            works = [timer.all_reduce(name, part) for part in parts] + [timer.cut(name, one) for one in cuts.values()]
            alone, part, *took = timer.seconds(works, options.rounds)
            row = place | {"tokens": tokens, "lane": name, "sum ms": 1e3 * alone, "sum of an eighth ms": 1e3 * part}
            row["launch of even 8 ms"] = launch(timer.cut(name, cuts["even 8"]))
            row |= {shape: 1e3 * seconds for shape, seconds in zip(cuts, took, strict=True)}
            if collective.multiprocessors:
                kept, collective.multiprocessors = collective.multiprocessors, 0
                took = timer.seconds([timer.cut(name, one) for one in cuts.values()], options.rounds)
                collective.multiprocessors = kept
                row |= {f"{shape}, none free": 1e3 * one for shape, one in zip(cuts, took, strict=True)}
            tell(row)


def launch(work: Callable[[], object]) -> float:
    """Milliseconds that Python needs to order a work."""
    times = []
    for _ in range(5):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1e3 * sorted(times)[2]


def plain_sum(timer: LayerTimer, tokens: int) -> Callable[[], object]:
    return lambda: dist.all_reduce(timer.out[:tokens])


def difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest, as a part of the largest number expected."""
    return ((expected - found).abs().max() / expected.abs().max().clamp_min(1e-20)).item()


def timeline(timer: LayerTimer, collective: Collective, blocks: Sequence[int]) -> dict[str, list[tuple[float, float]]]:
    """(begin, end) in ms of each block's matmul and sum, as this rank sees them. A sum begins when its matmul has ended
    and the sum before it has."""
    rows = sum(blocks)
    clock = _GpuClock() if timer.weight.is_cuda else _Clock()
    for _ in range(3):  # the last one counts
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
    """Of a CPU; a sum's end is noted by a thread that waits for it."""

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
    """Events; a sum's end on a stream that does nothing but wait for it."""

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
    """The timelines among ``rows``, one above the other, each with a row for matmuls and one for sums."""
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


def _hardware(link: str) -> str:
    host = machine.hardware(os.cpu_count() or 1)
    return host if link == "gloo" else f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}; {host}"


if __name__ == "__main__":
    sys.exit(main())
