"""Rows as people read them.

Used by: command.py.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from fastattention_vllm.bench.cpu_report import CpuReport, CpuRow, summaries


def print_rows(console: Console, rows: list[CpuRow], seconds: float) -> None:
    """One case: ours, the roofline, each peer; as soon as it is measured."""
    first = rows[0]
    console.print(f"[bold]{first.case}[/]  {first.threads} threads, {first.isa}, measured in {seconds:.0f} s")
    if first.fraction_of_limit is not None:
        console.print(
            f"  ours {_number(first.ours)} {first.unit}, {_number(first.milliseconds)} ms, IQR {_percent(first.iqr)}: "
            f"[bold]{_percent(first.fraction_of_limit)} of the roofline[/]"
        )
    if first.read_gbs is not None:
        longer = {"read": "the read", "flops": "the arithmetic"}[first.longer or "read"]
        console.print(
            f"  roofline {_number(first.limit)} {first.unit}, longer side: {longer}; "
            f"plain read {_number(first.read_gbs)} GB/s ({first.read_method}), "
            f"{first.peak_kind} {_number(first.peak_tflops)} TFLOPS"
        )
    for row in rows:
        if row.peer is not None:
            won = "" if row.ratio is None else f", ours is [bold]{row.ratio:.2f}x[/]"
            console.print(
                f"  {row.peer_name} ({row.peer_variant}) {_number(row.peer)} {row.unit}, "
                f"{_number(row.peer_milliseconds)} ms, error {row.peer_error:.1e}{won}"
            )
    for note in dict.fromkeys(note for row in rows for note in row.notes):
        console.print(f"  {note}", style="yellow", highlight=False, markup=False)


def print_report(console: Console, report: CpuReport) -> None:
    console.print(f"\n{report.hardware}")
    console.print(", ".join(f"{name} {version}" for name, version in report.versions.items()))
    table = Table(
        "case", "thr", "unit", "ours", "peer", "", "ratio", "roofline", "of roofline", "longer", "error", "IQR"
    )
    for row in report.rows:
        style = "red" if row.ratio is not None and row.ratio < 1 else None
        table.add_row(
            row.case,
            str(row.threads),
            row.unit,
            _number(row.ours),
            row.peer_name or "",
            _number(row.peer),
            "" if row.ratio is None else f"{row.ratio:.2f}x{'' if row.reliable else ' ?'}",
            _number(row.limit),
            _percent(row.fraction_of_limit),
            row.longer or "",
            "" if row.error is None else f"{row.error:.0e}",
            _percent(row.iqr),
            style=style,
        )
    console.print(table)
    unsure = sum(row.ratio is not None and not row.reliable for row in report.rows)
    if unsure:
        console.print(f"Marked with ?, and not part of the means: {unsure} with disturbed samples only.")
    found = summaries(report.rows)
    if found:
        means = Table("group", "peer", "geometric mean", "cases", "lost", "worst case", "", title="Ours against peers")
        for summary in found:
            means.add_row(
                summary.group,
                summary.peer,
                f"{summary.mean:.2f}x",
                str(summary.count),
                str(summary.losses),
                f"{summary.worst.case}, {summary.worst.threads} threads",
                f"{summary.worst.ratio:.2f}x",
            )
        console.print(means)
    with_roofline = [row for row in report.rows if row.fraction_of_limit is not None and row.reliable]
    if with_roofline:
        worst = min(with_roofline, key=lambda row: row.fraction_of_limit or 0.0)
        console.print(f"Furthest from the roofline: {worst.case}, {_percent(worst.fraction_of_limit)} of it.")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
