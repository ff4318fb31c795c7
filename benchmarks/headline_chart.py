"""Draw the chart in README.md from a recorded result of `benchmarks/host_layers.py`. No GPU is needed.

    python benchmarks/headline_chart.py

Run by: contributors, when the recorded result changes.
Needs: `make setup-dev`.

Reads:  benchmarks/results/2026-11-22-host-layers-h200-head-start.json
Writes: benchmarks/results/2026-11-22-host-layers-headline.png
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

RESULTS = Path(__file__).resolve().parent / "results"
SOURCE = RESULTS / "2026-11-22-host-layers-h200-head-start.json"
CHART = RESULTS / "2026-11-22-host-layers-headline.png"
CASE = re.compile(r"fp16 \(32,8,128\) (?P<tokens>\d+) tokens b1, (31 host layers, )?(?P<variant>.*)")
GPU_TOKENS = 4 * 2**30 // (32 * 2 * 8 * 128 * 2)
"""Tokens that fit into 4 GiB: 32 layers, keys and values, 8 KV heads of size 128, 2 bytes each."""
LINES = {
    "vLLM alone, KV on the device": ("vLLM alone, KV cache on the GPU", "#7f7f7f"),
    "auto": ("fastattention, 31 of 32 layers' KV cache on the host", "#c1272d"),
    "stream all": ("the same, all of it read over the link by the GPU", "#0071bc"),
}


def speeds(rows: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Decoded tokens per second of one request: by variant and tokens in the KV cache."""
    found: dict[str, dict[int, float]] = {variant: {} for variant in LINES}
    for row in rows:
        case = CASE.fullmatch(row["case"])
        if case and row["metric"] == "cooperative decode" and case["variant"] in LINES:
            found[case["variant"]][int(case["tokens"])] = row["ours"]
    return found


def draw(report: dict[str, Any], path: Path) -> None:
    found = speeds(report["rows"])
    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    for variant, (name, colour) in LINES.items():
        tokens, rates = zip(*sorted(found[variant].items()), strict=True)
        axes.plot(tokens, rates, marker="o", color=colour, label=name)
    axes.axvspan(GPU_TOKENS, 2 * max(found["auto"]), color="#f4f0e6", zorder=0)
    axes.text(
        GPU_TOKENS * 1.15, 150, "requests larger than the GPU's KV memory", fontsize=9, color="#6b5b2e", va="center"
    )
    label_last(axes, found)
    scales(axes, sorted(found["auto"]))
    axes.set_ylabel("decoded tokens per second, one request")
    axes.set_xlabel("tokens in the KV cache")
    axes.set_title("8B model shape, fp16, NVIDIA H200 with 4 GiB of KV memory, 16 CPU cores", fontsize=10)
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def label_last(axes: Axes, found: dict[str, dict[int, float]]) -> None:
    for variant in ("auto", "stream all"):
        tokens = max(found[variant])
        rate = found[variant][tokens]
        axes.annotate(
            f"{rate:.2f}", (tokens, rate), (6, 0), textcoords="offset points", color=LINES[variant][1], va="center"
        )


def scales(axes: Axes, tokens: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(tokens[0] * 0.85, tokens[-1] * 1.3)
    axes.set_xticks(tokens, [f"{number // 1024}K" for number in tokens])
    axes.set_yticks([1, 10, 100], ["1", "10", "100"])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    draw(json.loads(SOURCE.read_text()), CHART)
