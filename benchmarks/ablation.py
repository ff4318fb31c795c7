"""The paper's four strategies, each switched off alone and together: what that costs, measured or simulated.

    python benchmarks/ablation.py --json FILE             # CPU, simulated V100, and what results/ has of H200
    python benchmarks/ablation.py --where cpu             # one of cpu, v100, h200
    python benchmarks/ablation.py --from FILE             # the table of an earlier run

Two-level tiling and mask skipping are in the kernels, so these are built without them (cpu_variants.py; for the V100
edits of the source as in volta_launches.py), and what each computes is compared with the shipped one or with float64:

    one panel       blocks of query rows are as small as the second level's: each reads keys and values for itself
    one tile        the context is one tile: what a panel of rows works on is as long as that, and fits no cache (CPU)
    no skipping     every row meets every key, and each score is compared with what its row sees

The CPU's builds run in a process each, are asked in turns on one thread, and count that thread's own CPU time. The
V100 is the simulated one. Tiling-AllReduce and host layers are switched off by their options; on H200 they have been
run before (tiling_layer.py, first_token.py, host_layers.py), and their rows name the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cpu_variants
import torch
from rich.console import Console
from rich.table import Table

from fastattention_vllm.bench import machine
from fastattention_vllm.bench.saved_report import saved_report

RESULTS = Path(__file__).with_name("results")
BUILDS = Path(__file__).resolve().parents[1] / "build" / "ablation"
PLACES = ("cpu", "v100", "h200")
TWO_LEVEL, SKIPPING, ALL_REDUCE, HOST = (
    "two-level tiling",
    "mask skipping",
    "tiling-AllReduce",
    "host layers",
)
WINDOW = 512
ROUNDS = 5
CLOSE = 1e-2
"""What outputs of two builds, of numbers around 1, may differ by."""
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--cpu-tokens", type=int, default=8192)
    parser.add_argument("--cpu-heads", type=int, nargs=2, default=[4, 1], help="query heads and KV heads")
    parser.add_argument("--v100-tokens", type=int, default=4096)
    parser.add_argument("--v100-head-sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--from", type=saved_report, dest="saved", help="print the table of this file, and end")
    parser.add_argument("--answer", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer(*map(json.loads, options.answer))
        return 0
    if options.saved:
        try:
            show(json.loads(options.saved.read_text())["rows"])
        except (ValueError, LookupError, TypeError):
            sys.exit(f"ablation: {options.saved} was not written by this script's --json.")
        return 0
    rows: list[Row] = []
    for place in options.where:
        rows += {"cpu": cpu_rows, "v100": v100_rows, "h200": lambda _: stored_rows(RESULTS)}[place](options)
        if options.json:
            report = {
                "hardware": f"{machine.hardware(1)}; simulated V100; H200 as the rows' files say",
                "versions": machine.versions(),
                "date": datetime.date.today().isoformat(),
                "rows": rows,
            }
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    show(rows)
    return 0


def row(
    strategy: str, where: str, case: str, metric: str, unit: str, off: float, on: float, kind: str, source: str = ""
) -> Row:
    """``ratio`` is above 1 where the strategy gains. ``kind``: measured or simulated."""
    gain = off / on if unit in ("ms", "s") else on / off
    return {
        "case": f"{where}, {case}",
        "metric": metric,
        "unit": unit,
        "ours": round(on, 4),
        "peer_name": f"without {strategy}",
        "peer": round(off, 4),
        "ratio": round(gain, 4),
        "limit": None,
        "fraction_of_limit": None,
        "strategy": strategy,
        "where": where,
        "kind": kind,
        **({"source": source} if source else {}),
    }


def show(rows: Sequence[Row]) -> None:
    table = Table("strategy", "where and what", "unit", "off", "on", "gain", "", title="What each strategy is worth")
    for one in rows:
        kind = one["kind"] + (f", {one['source']}" if "source" in one else "")
        numbers = [f"{one[key]:.4g}" for key in ("peer", "ours")]
        table.add_row(one["strategy"], one["case"], one["unit"], *numbers, f"{one['ratio']:.2f}x", kind)
    Console(width=200).print(table)


# --- CPU --------------------------------------------------------------------------------------------------------------


def cpu_rows(options: argparse.Namespace) -> list[Row]:
    from fastattention_vllm.attention.cpu import kernels as cpu

    isa, tokens = cpu.isa(), options.cpu_tokens
    one_panel, one_tile = cpu_variants.rows_of_one_panel(isa), cpu_variants.one_tile(isa, tokens)
    every_key = cpu_variants.EVERY_KEY
    without = {
        f"{TWO_LEVEL} (one panel)": one_panel,
        f"{TWO_LEVEL} (one tile)": one_tile,
        SKIPPING: every_key,
        f"{TWO_LEVEL} (one panel) and {SKIPPING}": one_panel + every_key,
    }
    dtype = "bfloat16" if isa in ("amx", "avx512_bf16") else "float16"
    rows = []
    print("building the CPU kernels five times", flush=True)
    variants = cpu_variants.Variants(BUILDS, isa)
    libraries = {"": variants.build("base", ())}
    libraries |= {name: variants.build(f"v{at}", edits) for at, (name, edits) in enumerate(without.items())}
    for window in (-1, WINDOW):
        problem = {"tokens": tokens, "heads": options.cpu_heads, "window": window, "dtype": dtype}
        took = in_turns({name: ask(library, problem) for name, library in libraries.items()})
        seen = "causal" if window < 0 else f"window of {window}"
        heads = ",".join(map(str, (*options.cpu_heads, 128)))
        case = f"prefill {dtype} ({heads}) {tokens} tokens, {seen}"
        on = statistics.median(took[""])
        for name in without:
            off = statistics.median(took[name])
            found = row(name, f"CPU, {isa}, 1 thread", case, "prefill", "ms", 1e3 * off, 1e3 * on, "measured")
            rows.append(found | {"rounds ms": [round(1e3 * one, 2) for one in took[name]]})
            print(f"{case}, without {name}: {1e3 * off:.1f} ms, with {1e3 * on:.1f} ms", flush=True)
    return rows


def ask(library: Path, problem: Mapping[str, Any]) -> subprocess.Popen[str]:
    """A process of that library's, which answers each line that it is sent."""
    command = [sys.executable, __file__, "--answer", json.dumps(str(library)), json.dumps(problem)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def in_turns(processes: Mapping[str, subprocess.Popen[str]]) -> dict[str, list[float]]:
    """Seconds of each, by rounds; all outputs must be as the first one's."""
    took: dict[str, list[float]] = {name: [] for name in processes}
    sums: dict[str, list[float]] = {}
    try:
        for turn in range(ROUNDS + 1):
            for name in list(processes) if turn % 2 else list(processes)[::-1]:
                process = processes[name]
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write("go\n")
                process.stdin.flush()
                line = process.stdout.readline()
                if not line:
                    sys.exit(f"ablation: the build without {name or 'nothing'} has ended; its message is above.")
                found = json.loads(line)
                sums[name] = found["some"]
                if turn:  # the first one warms up
                    took[name].append(found["seconds"])
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    expected = sums[next(iter(processes))]
    for name, some in sums.items():
        far = [one - other for one, other in zip(some, expected, strict=True) if not abs(one - other) < CLOSE]
        if far:
            sys.exit(f"ablation: the build without {name} computes something else, by {far[0]}.")
    return took


def answer(library: str, problem: dict[str, Any]) -> None:
    os.environ["FASTATTENTION_CPU_LIBRARY"] = library
    from fastattention_vllm.attention.cpu import kernels as cpu
    from fastattention_vllm.attention.problem import AttentionProblem

    cpu.set_num_threads(1)
    tokens, (heads, kv_heads), dtype = problem["tokens"], problem["heads"], getattr(torch, problem["dtype"])
    seed = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn((tokens, count, 128), generator=seed).to(dtype) for count in (heads, kv_heads, kv_heads)
    )
    asked = AttentionProblem(
        query=query,
        key=key,
        value=value,
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
        kv_start_loc=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        scale=128**-0.5,
        causal=True,
        window=(problem["window"], -1),
    )
    out = torch.empty_like(query)
    for _ in sys.stdin:
        began = time.thread_time()
        cpu.run(asked, out)
        seconds = time.thread_time() - began
        some = out[:: max(1, tokens // 64), :, ::16].flatten().tolist()
        print(json.dumps({"seconds": seconds, "some": some}), flush=True)


# --- simulated V100 ---------------------------------------------------------------------------------------------------

V100_EVERY_KEY = (
    (
        "some_end = (max(0, end_of(last_position) - origin) + kTile - 1) / kTile;",
        "some_end = (kv_len + kTile - 1) / kTile;",
    ),
)
V100_COMPARED = (
    ("const int all_begin = min(some_end, max(some_begin, (begin_of(last_position) - origin + kTile - 1) / kTile));",
     "const int all_begin = some_end;"),
    ("const int all_end = max(all_begin, min(some_end, (end_of(first_position) - origin) / kTile));",
     "const int all_end = some_end;"),
)  # fmt: skip
ONE_PANEL = {"warps": 1, "tile": 32, "ctas_per_sm": 3}
"""A CTA is one warp, so tiles in shared memory serve its 32 rows alone; three of them fit on an SM."""


def v100_rows(options: argparse.Namespace) -> list[Row]:
    import volta_launches

    every_key = V100_EVERY_KEY + V100_COMPARED
    without: dict[str, tuple[Sequence[tuple[str, str]], bool]] = {
        f"{TWO_LEVEL} (one panel)": ((), True),
        f"{SKIPPING} (comparisons in every tile)": (V100_COMPARED, False),
        SKIPPING: (every_key, False),
        f"{TWO_LEVEL} (one panel) and {SKIPPING}": (every_key, True),
    }
    rows = []
    for head_size in options.v100_head_sizes:
        on = v100_seconds(volta_launches, options.v100_tokens, head_size, (), False)
        for name, (edits, one_panel) in without.items():
            off = v100_seconds(volta_launches, options.v100_tokens, head_size, edits, one_panel)
            case = f"prefill fp16 head size {head_size}, {options.v100_tokens} tokens, causal"
            rows.append(row(name, "V100", case, "prefill", "ms", 1e3 * off, 1e3 * on, "simulated"))
            print(f"V100, {case}, without {name}: {1e3 * off:.2f} ms, with {1e3 * on:.2f} ms", flush=True)
    return rows


def v100_seconds(
    volta_launches: Any, tokens: int, head_size: int, edits: Sequence[tuple[str, str]], one_panel: bool
) -> float:
    """Of a whole launch (volta_launches.py); what it computes is compared with float64."""
    variant = volta_launches.variants.prefill(head_size)
    if one_panel:
        variant = dataclasses.replace(variant, **ONE_PANEL)
    edit: Callable[[str], str] = volta_launches.everything
    if edits:
        edit = Compiled(volta_launches.compiled_out, tuple(edits))
    launch, error = volta_launches.our_prefill(tokens, head_size, True, edit=edit, variant=variant)
    if set(V100_EVERY_KEY) <= set(edits):
        launch.works = [float(tokens) + variant.tile] * len(launch.works)
        launch.alike = True
    seconds = float(volta_launches.whole_launch(launch, volta_launches.BATCH * volta_launches.HEADS).seconds)
    if not (wrong := error()) < CLOSE:
        sys.exit(f"ablation: the V100 kernel without {edits or one_panel} is wrong by {wrong}.")
    return seconds


@dataclasses.dataclass(frozen=True)
class Compiled:
    """An edit that equals another one of the same replacements, for the cache of compiled kernels."""

    compiled_out: Callable[[Sequence[tuple[str, str]], str], str]
    replacements: tuple[tuple[str, str], ...]

    def __call__(self, source: str) -> str:
        return self.compiled_out(self.replacements, source)


# --- H200, run before -------------------------------------------------------------------------------------------------


def stored_rows(folder: Path) -> list[Row]:
    """Of what real engines and single layers on H200 gave, the last time for each; none where there is none."""
    found: dict[tuple[str, str], Row] = {}
    for pattern, read in (
        ("*-tiling-layer-*.json", tiling_layer_rows),
        ("*-first-token-*.json", first_token_rows),
        ("*-host-layers-h200-head-start.json", host_layer_rows),
    ):
        for path in sorted(folder.glob(pattern)):
            for one in read(json.loads(path.read_text())["rows"]):
                found[one["strategy"], one["case"]] = one | {"source": path.name}
    return list(found.values())


def tiling_layer_rows(rows: Sequence[Row]) -> list[Row]:
    plain = {(one["model"], one["tokens"]): one["ms"] for one in rows if one["way"] == "plain"}
    forms = {"linear": "row-parallel layers", "full": "full form"}
    return [
        row(
            f"{ALL_REDUCE} ({forms[one['way']]})",
            f"{one['ranks']} H200, {one['link']}",
            f"one {one['model']} layer, {one['tokens']} tokens",
            "overlap layer",
            "ms",
            plain[one["model"], one["tokens"]],
            one["ms"],
            "measured",
        )
        for one in rows
        if one["way"] in forms
    ]


def first_token_rows(rows: Sequence[Row]) -> list[Row]:
    """Those of real engines that were run; a prediction is no ablation."""
    names = {
        "auto": f"{ALL_REDUCE} (row-parallel layers)",
        "full": f"{ALL_REDUCE} (full form)",
        "host": f"{HOST} (half of them)",
        "both": f"{ALL_REDUCE} (full form) and {HOST} (half of them)",
    }
    found = []
    for one in rows:
        case, _, way = one["case"].rpartition(", tiling ")
        if one["kind"] == "measured" and way in names:
            metric = "overlap time to first token"
            found.append(row(names[way], "H200", case, metric, "ms", one["peer"], one["ours"], "measured"))
    return found


def host_layer_rows(rows: Sequence[Row]) -> list[Row]:
    """How much one request may hold, and how fast it is answered against layers that the GPU reads over the link."""
    held = [one for one in rows if one["metric"] == "cooperative needles" and one["ours"] == one["limit"]]

    def most(of: Callable[[str], bool]) -> int:
        return max(int(one["case"].split(" tokens")[0].split()[-1]) for one in held if of(one["case"]))

    alone, ours = most(lambda case: "vLLM alone" in case), most(lambda case: "host layers" in case)
    found = [
        row(
            f"{HOST} (31 of 32)",
            "H200, 4 GiB for KV",
            "one request, all needles found",
            "cooperative tokens held",
            "tokens",
            alone,
            ours,
            "measured",
        )
    ]
    for one in rows:
        if one["metric"] == "cooperative decode" and one["case"].endswith("host layers, auto"):
            case = one["case"].removesuffix(", auto")
            name = f"{HOST}' CPU share (else the GPU reads all)"
            metric = "cooperative decode"
            found.append(
                row(name, "H200, 4 GiB for KV", case, metric, "tokens/s", one["peer"], one["ours"], "measured")
            )
    return found


if __name__ == "__main__":
    sys.exit(main())
