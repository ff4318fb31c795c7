"""The tables and the chart of docs/ascend.md, from a recorded result of ascend_predicted.py.

    python benchmarks/ascend_predicted_tables.py

Run by: contributors, when the recorded result changes.
Needs: `make setup-dev`.

Reads:  benchmarks/results/2026-11-25-ascend-predicted.json
Writes: benchmarks/results/2026-11-25-ascend-predicted.png, and the tables to standard output
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
SOURCE = RESULTS / "2026-11-25-ascend-predicted.json"
CHART = RESULTS / "2026-11-25-ascend-predicted.png"
OURS = "512 keys, running ahead"
COLOURS = {
    OURS: "#c1272d",
    "128 keys, running ahead": "#0071bc",
    "512 keys, nothing ahead": "#8c6bb1",
    "128 keys, nothing ahead": "#7f7f7f",
}
TOKENS = (1, 2, 4, 8, 16, 32)
MIB = 2**20

Rows = list[dict[str, Any]]


def rates(rows: Rows, case: str) -> dict[str, float]:
    """TFLOPS of one case by form."""
    mine = [row for row in rows if row["case"] == case and row["metric"] == "prefill rate"]
    return {OURS: mine[0]["ours"]} | {row["peer_name"]: row["peer"] for row in mine if row["peer_name"] in COLOURS}


def table(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    first, *rest = ("| " + " | ".join(line) + " |" for line in (head, *lines))
    return "\n".join((first, "|---" * len(head) + "|", *rest))


def tiling(rows: Rows) -> str:
    lines = []
    for kind in ("full", "causal"):
        for tokens in TOKENS:
            found = rates(rows, f"prefill D128 {kind} {tokens}K")
            ratio = found[OURS] / found["128 keys, nothing ahead"]
            lines.append((f"{kind} {tokens}K", *(f"{found[form]:.1f}" for form in COLOURS), f"{ratio:.2f}x"))
    return table(("predicted TFLOPS", *COLOURS, "two levels against one"), lines)


def levels(rows: Rows) -> str:
    """Where the bytes and the time of a tile go."""
    lines = []
    paths = ("to L1", "L1 to L0", "from L0C", "to UB", "from UB")
    for form in COLOURS:
        row = next(row for row in rows if row["case"] == f"tile of 128 queries and 8192 keys, {form}")
        moved = (f"{row['tile_bytes'][path] / MIB:.1f}" for path in paths)
        busy = (f"{row['busy'][pipe]:.0%}" for pipe in ("AIC M", "AIC FIX", "AIV V"))
        flags = f"{row['tile_cross_core_flags']} + {row['tile_flags']}"
        lines.append((form, f"{row['ours']:.0f}", *moved, flags, *busy))
    names = ("MiB " + path for path in paths)
    return table(
        ("tile", "us", *names, "flags between cores + within one", "cube busy", "fixpipe busy", "vector busy"), lines
    )


def masks(rows: Rows) -> str:
    lines = []
    for row in rows:
        if "mask_bytes" not in row:
            continue
        memory = f"{row['mask_bytes'] / MIB:.2f} MiB" if row["mask_bytes"] else "none"
        if row.get("refused"):
            lines.append((row["peer_name"], memory, "", "", "", "refused by the compiler"))
            continue
        read = row["tile_bytes"]["to UB"] / MIB
        lines.append(
            (
                row["peer_name"],
                memory,
                f"{read:.2f}",
                f"{row['memory']['UB'] / 1024:.0f}",
                f"{row['vector_cycles'] / 1e3:.0f}",
                f"{row['peer']:.1f}",
            )
        )
    head = ("mask", "matrix in memory", "MiB to UB", "KiB of UB", "thousand vector cycles")
    return table((*head, "predicted TFLOPS, causal 8K"), lines)


def decoding(rows: Rows) -> str:
    groups = (1, 4, 8, 16, 32, 64)
    found = {row["case"]: row["ours"] for row in rows if row["metric"] == "decode rate"}
    lines = []
    for kept, sequences in ((1, 16), (4, 1), (4, 16), (32, 1), (32, 16), (128, 1)):
        name = f"decode D128 {kept}K b{sequences}"
        each = (f"{found[f'{name}, {group} heads per KV head']:.0f}" for group in groups)
        lines.append((f"{kept}K keys, {sequences} sequence{'s' * (sequences > 1)}", *each))
    for pages in (4, 8, 16, 32, 64, 256):
        name = f"decode D128 program of {pages} pages"
        each = (f"{found[f'{name}, {group} heads per KV head']:.0f}" for group in groups)
        lines.append((f"one program of {pages} pages, on all cores", *each))
    return table(("predicted GB/s of 1638; query heads per KV head", *map(str, groups)), lines)


def others(rows: Rows) -> str:
    names = [row["case"].removeprefix("prefill ") for row in rows if row["metric"] == "prefill rate"]
    chosen = [name for name in names if ", " in name or not name.startswith("D128")]
    found = {row["case"]: row["ours"] for row in rows if row["metric"] == "prefill rate"}
    return table(("predicted TFLOPS", "ours"), [(name, f"{found[f'prefill {name}']:.1f}") for name in chosen])


def tables(report: dict[str, Any]) -> Iterator[str]:
    for make in (tiling, levels, masks, others, decoding):
        yield make(report["rows"])


def draw(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    for axes, kind in zip(panels, ("full", "causal"), strict=True):
        for form, colour in COLOURS.items():
            values = [rates(report["rows"], f"prefill D128 {kind} {tokens}K")[form] for tokens in TOKENS]
            axes.plot(TOKENS, values, marker="o", color=colour, label=form)
        axes.set_xscale("log", base=2)
        axes.set_xticks(TOKENS, [f"{tokens}K" for tokens in TOKENS])
        axes.set_ylim(0, None)
        axes.set_xlabel("tokens of one prompt")
        axes.set_title(f"{kind} attention, head size 128", fontsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("predicted TFLOPS, 910B1; not measured")
    panels[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    recorded = json.loads(SOURCE.read_text())
    print("\n\n".join(tables(recorded)))
    draw(recorded, CHART)
