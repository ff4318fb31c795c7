"""Plots of a report: fraction of the roofline and speed by context, speed by cores; one panel per group of cases.

Used by: command.py and benchmarks/host_layers_plot.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy

matplotlib.use("Agg")  # draws into files, with or without a screen

from matplotlib import pyplot
from matplotlib.axes import Axes

from fastattention_vllm.bench.cases import parse_case
from fastattention_vllm.bench.cpu_report import CpuReport, CpuRow

Line = list[tuple[float, float]]
Panels = dict[str, dict[str, Line]]
"""Title of a panel: name of a line: (x, y) of its points."""

STYLES = {
    "ours": {"color": "tab:blue"},
    "roofline": {"color": "black", "linestyle": "--"},
    "torch SDPA": {"color": "tab:orange"},
    "vLLM CPU_ATTN": {"color": "tab:green"},
}


def draw(report: CpuReport, folder: Path) -> list[Path]:
    """Write PNG files into ``folder``, which is made. A line takes two points, a panel a line, a file a panel."""
    folder.mkdir(parents=True, exist_ok=True)
    maximum = max((row.threads for row in report.rows), default=0)
    written = []
    for kind in ("decode", "prefill"):
        rows = [row for row in report.rows if row.case.startswith(kind)]
        widest = [row for row in rows if row.threads == maximum]
        unit = rows[0].unit if rows else ""
        plots = [
            (
                f"{kind}-roofline-by-context.png",
                f"{kind}, {maximum} threads: part of the roofline",
                panels(widest, dtype_of, heads_of, context_of, lambda row: [percent_of_roofline(row)]),
                by_context("% of the roofline"),
            ),
            (
                f"{kind}-speed-by-context.png",
                f"{kind}, {maximum} threads",
                panels(widest, lambda row: f"{dtype_of(row)} {heads_of(row)}", None, context_of, speeds),
                by_context(unit),
            ),
            (
                f"{kind}-speed-by-cores.png",
                f"{kind} by cores",
                panels(rows, lambda row: row.case, None, lambda row: float(row.threads), speeds),
                by_cores(unit),
            ),
        ]
        for name, title, found, dress in plots:
            if found:
                save(folder / name, f"{title}. {report.hardware}, {report.date}", found, dress)
                written.append(folder / name)
    return written


def speeds(row: CpuRow) -> list[tuple[str, float | None]]:
    return [("ours", row.ours), ("roofline", row.limit), (row.peer_name or "", row.peer)]


def percent_of_roofline(row: CpuRow) -> tuple[str, float | None]:
    return "", None if row.fraction_of_limit is None else 100 * row.fraction_of_limit


def context_of(row: CpuRow) -> float:
    return float(parse_case(row.case).kv_len)


def dtype_of(row: CpuRow) -> str:
    return row.case.split()[1]


def heads_of(row: CpuRow) -> str:
    """What is left of the case without dtype and context."""
    case = parse_case(row.case)
    words = [row.case.split()[2]]
    if case.kind == "prefill" and case.q_len < case.kv_len:
        words.append(f"{case.q_len} new")
    if case.kind == "decode" or case.batch > 1:
        words.append(f"b{case.batch}")
    return " ".join(words)


def panels(
    rows: list[CpuRow],
    panel: Callable[[CpuRow], str],
    line: Callable[[CpuRow], str] | None,
    x: Callable[[CpuRow], float],
    values: Callable[[CpuRow], list[tuple[str, float | None]]],
) -> Panels:
    """Rows sorted into panels and lines; without ``line``, the names that come with ``values`` are the lines.

    The title says where threads had to wait for a CPU in every sample of some point.
    """
    found: dict[str, dict[str, dict[float, float]]] = {}
    for row in rows:
        for name, y in values(row):
            title = line(row) if line is not None else name
            if y is not None and title:
                found.setdefault(panel(row), {}).setdefault(title, {})[x(row)] = y
    long = {
        title: {name: sorted(points.items()) for name, points in lines.items() if len(points) > 1}
        for title, lines in found.items()
    }
    unsure = {panel(row) for row in rows if not row.reliable}
    return {title + (" (disturbed)" if title in unsure else ""): lines for title, lines in long.items() if lines}


def x_values(axes: Axes) -> list[float]:
    return sorted({x for line in axes.lines for x in numpy.asarray(line.get_xdata(), dtype=float).tolist()})


def by_context(label: str) -> Callable[[Axes], None]:
    def dress(axes: Axes) -> None:
        ticks = x_values(axes)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{x / 1024:g}K" for x in ticks])
        axes.minorticks_off()
        axes.set_xlabel("tokens in the KV cache")
        axes.set_ylabel(label)
        if label.startswith("%"):
            axes.axhline(100, color="black", linestyle="--", linewidth=1)

    return dress


def by_cores(label: str) -> Callable[[Axes], None]:
    def dress(axes: Axes) -> None:
        axes.set_xticks(x_values(axes))
        axes.set_xlabel("cores")
        axes.set_ylabel(label)

    return dress


def save(path: Path, title: str, found: Panels, dress: Callable[[Axes], None]) -> None:
    columns = min(3, len(found))
    lines = -(-len(found) // columns)
    size = (5.2 * columns, 3.8 * lines) if len(found) > 1 else (8, 5)
    figure, grid = pyplot.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    figure.suptitle(title, fontsize=9, wrap=True)
    for axes in grid.flat[len(found) :]:
        axes.set_visible(False)
    for axes, (name, points) in zip(grid.flat, found.items(), strict=False):
        for label, line in points.items():
            axes.plot([x for x, _ in line], [y for _, y in line], label=label, marker="o", **STYLES.get(label, {}))
        dress(axes)
        axes.set_title(name, fontsize=9)
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
