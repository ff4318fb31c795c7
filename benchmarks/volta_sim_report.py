"""What volta_sim.py has found: which demands on the kernels it misses, as tables, and drawn."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import volta_peer
from rich.console import Console
from rich.table import Table
from volta_launches import BATCH, HEADS, PAGE

TITLE = "Simulated V100 (80 SMs at 1.38 GHz)"
HEAD_SIZES = (64, 128, 256)
TOKENS = (4096, 2048, 1024, 8192, 16384)
"""The most useful first: a run that is stopped keeps what it has."""
CONTEXTS = ((4096, 32), (16384, 16), (65536, 8))
"""Tokens and sequences that are decoded."""
FEED = 817.0
"""GB/s from DRAM."""
OURS, PEER = "ours", "PyTorch mem-efficient"
Row = dict[str, Any]


# --- what was demanded ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Must:
    text: str
    value: str
    met: bool


def musts(rows: list[Row]) -> list[Must]:
    """The project's demands on these kernels, each with the row that is furthest from it."""
    found: list[Must] = []
    prefill = [row for row in rows if row["kind"] == "prefill"]
    ours = [row for row in prefill if row["kernel"] == OURS]

    def at_least(text: str, chosen: list[Row], key: str, limit: float, unit: str = "") -> None:
        if chosen:
            worst = min(chosen, key=lambda row: row[key])
            found.append(Must(text, f"{worst[key]:.3g}{unit} ({label(worst)})", worst[key] >= limit))

    def at_most(text: str, chosen: list[Row], key: str, limit: float) -> None:
        if chosen:
            worst = max(chosen, key=lambda row: row[key])
            found.append(Must(text, f"{worst[key]:.2g} ({label(worst)})", worst[key] <= limit))

    for head_size in (64, 128):
        for causal, limit in ((False, 76), (True, 72)):
            mine = [r for r in ours if r["head_size"] == head_size and r["causal"] == causal and r["tokens"] >= 4096]
            at_least(f"prefill {head_size}, {kind(causal)}, 4K and up: at least {limit} TFLOPS", mine, "tflops", limit)
    for causal in (False, True):
        mine = [r for r in ours if r["head_size"] == 256 and r["causal"] == causal and r["tokens"] >= 4096]
        at_least(f"prefill 256, {kind(causal)}, 4K and up: at least 55 TFLOPS", mine, "tflops", 55)
    ratios = against_peer(rows)
    if ratios:
        mean = math.exp(sum(math.log(row["ratio"]) for row in ratios) / len(ratios))
        text = f"the peer's speed 1.75 times, geometric mean of {len(ratios)}"
        found.append(Must(text, f"{mean:.3g}", mean >= 1.75))
    at_least("the peer's speed 1.6 times, every row", ratios, "ratio", 1.6)
    at_most("masks and paging cost 5 % at most", [row for row in rows if row["kind"] == "masks"], "cost", 0.05)
    decode = [row for row in rows if row["kind"] == "decode"]
    for head_size, limit in ((64, 0.92), (128, 0.92), (256, 0.85)):
        for tokens, _ in CONTEXTS:
            mine = [row for row in decode if (row["head_size"], row["tokens"]) == (head_size, tokens)]
            text = f"decode {head_size}, {tokens // 1024}K: {100 * limit:.0f} % of the feed, sum of the parts included"
            at_least(text, mine, "part_of_feed", limit)
    at_most("error against float64 2e-3 at most", ours + decode, "error", 2e-3)
    return found


def against_peer(rows: list[Row]) -> list[Row]:
    """Our rows of prefill that have one of the peer, with ``ratio`` to it."""
    prefill = {
        (row["kernel"], row["head_size"], row["tokens"], row["causal"]): row for row in rows if row["kind"] == "prefill"
    }
    return [
        {**row, "ratio": row["tflops"] / peer["tflops"], "peer": peer}
        for key, row in prefill.items()
        if key[0] == OURS and (peer := prefill.get((PEER, *key[1:]))) is not None
    ]


def fields(row: Row, rows: list[Row]) -> Row:
    """What rows of every result have. Whoever compares kernels reads our rows: the peer's have no ``ours``."""
    unit, ours, peer_name, peer, limit, ratio = "TFLOPS", None, None, None, None, None
    case, metric = label(row), "prefill rate"
    if row["kind"] == "decode":
        metric, unit, ours, limit = "decode KV read rate", "GB/s", row["gbs"], FEED
    elif row["kind"] == "masks":
        metric, unit, ours = "prefill time with masks and paging", "of the time without", 1 + row["cost"]
        peer_name, peer, ratio = row["against"], 1.0, 1 / ours
    elif row["kind"] == "method":
        case, metric = f"{case} {row['what']}", "prefill rate of the peer"
        ours, peer_name, peer, ratio = row["tflops"], "simulator's prototype", row["prototype"], row["ratio"]
    elif row["kernel"] == PEER:
        peer_name, peer = PEER, row["tflops"]
    else:
        ours, limit = row["tflops"], row["bound_tflops"]
        for both in against_peer([row, *rows]):
            if label(both) == case:
                peer_name, peer, ratio = PEER, both["peer"]["tflops"], both["ratio"]
    return {
        "case": case,
        "metric": metric,
        "unit": unit,
        "ours": ours,
        "peer_name": peer_name,
        "peer": peer,
        "ratio": ratio,
        "limit": limit,
        "fraction_of_limit": ours / limit if ours and limit else None,
    }


def kind(causal: bool) -> str:
    return "causal" if causal else "not causal"


def label(row: Row) -> str:
    words = [row["kind"], str(row["head_size"]), f"{row['tokens'] / 1024:g}K"]
    if row["kind"] == "decode":
        words += [f"batch {row['batch']}", f"GQA {row['group']}", f"page {row['page']}"]
    elif "causal" in row:
        words.append(kind(row["causal"]))
    return " ".join(words)


def versions() -> dict[str, str]:
    names = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvdisasm", "numpy", "torch", "fastattention-vllm")
    found = {"python": platform.python_version(), "peer": f"cubin of {volta_peer.WHEEL}, SHA-256 {volta_peer.SHA256}"}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def report_of(rows: list[Row]) -> dict[str, Any]:
    return {
        "hardware": TITLE,
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        **demanded(rows),
    }


def demanded(rows: list[Row]) -> dict[str, Any]:
    return {
        "rows": [row | fields(row, rows) for row in rows],
        "musts": [{"must": must.text, "found": must.value, "met": must.met} for must in musts(rows)],
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    rows: list[Row] = report["rows"]
    console.print(f"[bold]{TITLE}[/]: every figure below is simulated. {report['date']}")
    ratios = {label(row): row for row in against_peer(rows)}
    table = Table(title=f"Prefill, batch {BATCH} x {HEADS} heads, pages of {PAGE}. {TITLE}")
    for name in ("head", "tokens", "", "ours TFLOPS", "static bound", "peer TFLOPS", "its bound", "ratio",
                 "error", "its error", "simulated"):  # fmt: skip
        table.add_column(name)
    order = sorted(
        (row for row in rows if row["kind"] == "prefill" and row["kernel"] == OURS),
        key=lambda row: (row["head_size"], row["causal"], row["tokens"]),
    )
    for row in order:
        peer = ratios.get(label(row), {}).get("peer")
        table.add_row(
            str(row["head_size"]), f"{row['tokens'] // 1024}K", kind(row["causal"]), f"{row['tflops']:.1f}",
            f"{row['bound_tflops']:.1f} {row['bound_unit']}", *(
                ("", "", "") if peer is None else
                (f"{peer['tflops']:.1f}", f"{peer['bound_tflops']:.1f} {peer['bound_unit']}",
                 f"{row['tflops'] / peer['tflops']:.2f}x")
            ), f"{row['error']:.1e}", "" if peer is None else f"{peer['error']:.1e}", row["simulated"],
        )  # fmt: skip
    console.print(table)
    decode = Table(title=f"Decode, {HEADS} query heads, fed at {FEED:.0f} GB/s. {TITLE}")
    for name in ("head", "tokens", "batch", "GQA", "page", "GB/s", "of the feed", "static bound", "sum of parts",
                 "error"):  # fmt: skip
        decode.add_column(name)
    for row in rows:
        if row["kind"] == "decode":
            decode.add_row(
                str(row["head_size"]), f"{row['tokens'] // 1024}K", str(row["batch"]), str(row["group"]),
                str(row["page"]), f"{row['gbs']:.0f}", f"{100 * row['part_of_feed']:.1f} %",
                f"{row['bound_gbs']:.0f} {row['bound_unit']}",
                f"{100 * row['combine_milliseconds'] / row['milliseconds']:.1f} %", f"{row['error']:.1e}",
            )  # fmt: skip
    console.print(decode)
    masks = Table(
        "head", "", "cost", "against the same source", title=f"Masks and paging against compiled out, 4K. {TITLE}"
    )
    for row in rows:
        if row["kind"] == "masks":
            masks.add_row(str(row["head_size"]), kind(row["causal"]), f"{100 * row['cost']:.1f} %", row["against"])
    console.print(masks)
    method = Table("head", "tokens", "", "TFLOPS", "prototype's", "ratio", title=f"The peer, method check. {TITLE}")
    for row in rows:
        if row["kind"] == "method":
            method.add_row(
                str(row["head_size"]), str(row["tokens"]), row["what"], f"{row['tflops']:.1f}",
                f"{row['prototype']}", f"{row['ratio']:.3f}",
            )  # fmt: skip
    console.print(method)
    demands = Table("demand", "furthest from it", "", title=f"Demands. {TITLE}")
    for must in musts(rows):
        demands.add_row(must.text, must.value, "met" if must.met else "[red]missed[/]")
    console.print(demands)


def draw(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows: list[Row] = report["rows"]
    figure, panels = pyplot.subplots(1, len(HEAD_SIZES) + 1, figsize=(18, 4.6), layout="constrained")
    figure.suptitle(
        f"{TITLE}, nothing here is measured on one. Prefill: batch {BATCH} x {HEADS} heads. {report['date']}"
    )
    for axes, head_size in zip(panels, HEAD_SIZES, strict=False):
        for kernel, colour in ((OURS, "tab:blue"), (PEER, "tab:orange")):
            for causal, style in ((False, "-"), (True, "--")):
                points = sorted(
                    (row["tokens"], row["tflops"])
                    for row in rows
                    if row["kind"] == "prefill"
                    and (row["kernel"], row["head_size"], row["causal"]) == (kernel, head_size, causal)
                )
                if points:
                    axes.plot(*zip(*points, strict=True), style, color=colour, marker="o",
                              label=f"{kernel}, {kind(causal)}")  # fmt: skip
        axes.axhline(113, color="black", linestyle=":", linewidth=1, label="tensor cores' peak")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(TOKENS), [f"{count // 1024}K" for count in sorted(TOKENS)])
        axes.minorticks_off()
        axes.set_ylim(0, 120)
        axes.set_xlabel("tokens")
        axes.set_ylabel("simulated TFLOPS")
        axes.set_title(f"prefill, head size {head_size}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    axes = panels[-1]
    decode = [row for row in rows if row["kind"] == "decode" and row["tokens"] == 16384]
    if decode:
        names = [f"{row['head_size']}, GQA {row['group']}, page {row['page']}" for row in decode]
        axes.barh(names, [row["gbs"] for row in decode], color="tab:blue")
        axes.axvline(FEED, color="black", linestyle=":", label=f"feed, {FEED:.0f} GB/s")
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelsize=7)
        axes.set_xlabel("simulated GB/s, sum of parts included")
        axes.set_title("decode, 16K tokens, batch 16", fontsize=10)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)
