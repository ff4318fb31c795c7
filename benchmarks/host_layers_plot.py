"""Decoding speed against context, drawn from saved runs of host_layers.py.

Used by: host_layers.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler

from fastattention_vllm.bench import plots

POWERS_OF_TWO = [1 << exponent for exponent in range(10, 20)]
"""Tokens marked in the chart, because the number that fits on the device is not round."""

LIMIT = "limit: a plain read"


def draw(path: Path, results: list[Path]) -> None:
    """Decoding speed of one request against its context, with a line for each variant."""
    lines: dict[str, plots.Line] = {}
    reports = [json.loads(result.read_text()) for result in results]
    for each in [each for report in reports for each in report["rows"] if each["metric"] == "cooperative decode"]:
        found = re.search(r"(\d+) tokens b1, (?:\d+ host layers, )?(.*)", each["case"])
        if found:
            lines.setdefault(found[2], []).append((float(found[1]), each["ours"]))
            if each.get("limit") and ", " not in found[2]:  # of 16 bits, without drafts
                lines.setdefault(LIMIT, []).append((float(found[1]), each["limit"]))

    tokens = [x for line in lines.values() for x, _ in line]
    marked = [x for x in POWERS_OF_TWO if min(tokens) <= x <= max(tokens)]

    def dress(axes: Any) -> None:
        plots.by_context("tokens per second, one request")(axes)
        axes.set_xticks(marked, [f"{x // 1024}K" for x in marked])
        axes.set_yscale("log")

    long = {name: sorted(line) for name, line in lines.items()}
    with matplotlib.rc_context({"axes.prop_cycle": cycler(color=matplotlib.colormaps["tab20"].colors)}):
        plots.save(path, f"{reports[0]['hardware']}, {reports[0]['date']}", {"decoding": long}, dress)
