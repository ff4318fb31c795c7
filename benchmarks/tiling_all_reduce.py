"""Row-parallel linear layers of 8B and 70B models in blocks, against the plain layer: what is hidden and what is lost.

    python benchmarks/tiling_all_reduce.py --ranks 2 --links nvlink host --json FILE     # on GPUs of one machine
    python benchmarks/tiling_all_reduce.py --ranks 2 --links gloo --tiny --json FILE     # anywhere
    python benchmarks/tiling_all_reduce.py --draw FILE --timeline PICTURE                # from a saved run

Run by: contributors who change tiling-AllReduce, and owners of several GPUs (`fastattention doctor --tp` is shorter).
Needs: as many NVIDIA GPUs as ranks; none with `--links gloo --tiny`. matplotlib for pictures.

"host" sets NCCL_P2P_DISABLE=1: all bytes between GPUs pass through host memory, as between V100s on PCIe without P2P. A
row is a layer, a number of tokens and a variant: "plain" (matmul, then NCCL's all-reduce), "auto" (what
`tiling_all_reduce: "auto"` does, after calibrating itself), "2", "4" and "8" (that many equal blocks). Times are
medians of rounds in which all variants alternate, averaged over the ranks, by events on the GPU. "hidden" is (matmul +
all-reduce - time) / min(matmul, all-reduce), both measured alone in the plain layer; "speedup" is plain / time.
"ordering ms" is the time that Python takes to enqueue the work; it is not part of the other times. Each variant's
result is compared with the plain layer's. `--sweep COLLECTIVE...` times splits with each of these collectives (see
parallel/named_collectives.py) instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiling_ranks import LINKS, Told, collectives_of, difference, join, run_all, time_row, why_not
from tiling_timeline import draw, timeline

from fastattention_vllm.bench import ranks
from fastattention_vllm.bench.ranks import plain_layer
from fastattention_vllm.bench.report import Row
from fastattention_vllm.bench.saved_report import saved_report
from fastattention_vllm.parallel import calibrate
from fastattention_vllm.parallel.collective import Collective
from fastattention_vllm.parallel.layer_timer import LayerTimer
from fastattention_vllm.parallel.plan import cut, even

LAYERS = {  # model: layer: (inputs of all ranks, outputs)
    "8B": {"o_proj": (4096, 4096), "down_proj": (14336, 4096)},
    "70B": {"o_proj": (8192, 8192), "down_proj": (28672, 8192)},
}
TINY = {"tiny": {"o_proj": (64, 32)}}
TOKENS = [256 << i for i in range(8)]
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
"""Largest allowed difference from the plain layer, relative to its largest number. A larger one stops the run."""
SHORT = 2048
"""Up to this many tokens there are three times as many rounds, because times of 0.1 ms vary more."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=["nvlink", "host"])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--min-tokens", type=int, default=2048, help="auto splits no shorter steps")
    parser.add_argument("--collectives", nargs="+", help="collectives from which auto chooses")
    parser.add_argument(
        "--sweep", nargs="+", metavar="COLLECTIVE", help="time cuts by each of these collectives instead"
    )
    parser.add_argument("--tiny", action="store_true", help="one small layer in fp32, to try the benchmark itself")
    parser.add_argument("--models", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for a link, after which it is ended")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--draw", type=saved_report, help="draw the timelines in this file of an earlier run, and end")
    parser.add_argument("--timeline", type=Path, help="file for the picture of the timelines")
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(options.draw.read_text())["rows"], options.timeline or options.draw.with_suffix(".png"))
        return 0
    if reason := why_not(options.links, options.ranks):
        print(f"tiling_all_reduce: {reason}", file=sys.stderr)
        return 2
    complete, told = run_all(work, describe, options)
    if options.timeline and told:
        draw(told, options.timeline)
    return 0 if complete else 1


def describe(told: Told, before: Sequence[Told]) -> Row:
    """A result in the common form. The peer is the plain layer of the same case, which is in ``before``.

    The limit is the longer one of matmul and all-reduce.
    """
    if "note" in told:
        return Row(case=told["note"], metric="overlap note", unit="", ours=None, **told)
    case = f"{told['model']} {told['layer']}, {told['ranks']} ranks, {told['link']}"
    if "chosen" in told:
        return Row(case=case, metric="overlap calibration", unit="s", ours=told["calibration seconds"], **told)
    case = f"{told['tokens']} tokens, {case}"
    if "timeline" in told:
        end = told["timeline"]["all-reduce"][-1][1]
        return time_row(f"{case}, {told['lane']}", "overlap timeline", end, None, None, told)
    place = ("link", "ranks", "model", "layer", "tokens")
    plain = next(one for one in (told, *before) if "plain ms" in one and all(one[key] == told[key] for key in place))
    limit = max(plain["matmul ms"], plain["all-reduce ms"])
    if "way" in told:
        way, milliseconds = told["way"], told["ms"]
    elif "lane" in told:
        shape = min(SHAPES, key=lambda name: float(told[name]))
        way, milliseconds = f"{told['lane']}, the fastest cut: {shape}", told[shape]
    else:
        way, milliseconds = "plain", plain["plain ms"]
    peer = None if way == "plain" else plain["plain ms"]
    return time_row(f"{case}, {way}", "overlap row-parallel layer", milliseconds, peer, limit, told)


def work(rank: int, folder: str, said: tuple[str, argparse.Namespace]) -> None:
    """Runs on each rank."""
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
    """Time each collective alone, and splits of several shapes with it, with and without free multiprocessors."""
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
    """Milliseconds that Python needs to launch a work."""
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


if __name__ == "__main__":
    sys.exit(main())
