"""Rows of `fastattention bench cpu`, and their geometric means by group and peer.

Used by: command.py, runner.py, table.py and plots.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict, Field

from fastattention_vllm.bench import machine
from fastattention_vllm.bench.report import Report, Row, geometric_mean, today


class CpuRow(Row):
    """One case and one peer."""

    model_config = ConfigDict(extra="forbid")

    threads: int
    isa: str
    longer: str | None = None
    """Which side of the roofline: ``read`` or ``flops``."""
    milliseconds: float | None = None
    iqr: float | None = None
    """Of our time, over its median."""
    read_gbs: float | None = None
    """The plain read of the same pages, GB/s."""
    read_method: str | None = None
    peak_tflops: float | None = None
    peak_kind: str | None = None
    error: float | None = None
    """Largest error over the root mean square of a float64 reference."""
    peer_variant: str | None = None
    peer_milliseconds: float | None = None
    peer_iqr: float | None = None
    peer_error: float | None = None
    samples: int | None = None
    """Undisturbed samples of ours that the median is over."""
    disturbed: int | None = None
    """Samples of everyone in this case that did not count, because threads waited for a CPU."""
    sweep_gib: float | None = None
    """Memory read before any of it is read again."""
    reliable: bool = True
    """False where threads waited for a CPU in every sample of ours, of the peer or of the roofline."""
    notes: list[str] = Field(default_factory=list)
    """What was wrong, skipped, cut short or disturbed, in sentences."""


CpuReport = Report[CpuRow]


def cpu_report(rows: list[CpuRow], threads: int) -> CpuReport:
    return CpuReport(hardware=machine.hardware(threads), versions=machine.versions(), date=today(), rows=rows)


GROUPS: dict[str, Callable[[CpuRow], bool]] = {
    "decode": lambda row: row.case.startswith("decode"),
    "prefill bf16": lambda row: row.case.startswith("prefill bf16"),
    "prefill fp16": lambda row: row.case.startswith("prefill fp16"),
    "prefill fp32": lambda row: row.case.startswith("prefill fp32"),
}


def against_best_peer(rows: list[CpuRow]) -> list[CpuRow]:
    """For each case the row with the strongest peer, cases without any left out."""
    best: dict[tuple[str, int], CpuRow] = {}
    for row in rows:
        key = (row.case, row.threads)
        if row.ratio is not None and (key not in best or row.ratio < (best[key].ratio or math.inf)):
            best[key] = row
    return list(best.values())


class Summary(BaseModel):
    """Geometric mean of the ratios of a group, how many they are and which is the worst."""

    group: str
    peer: str
    mean: float
    count: int
    losses: int
    worst: CpuRow


def summaries(rows: list[CpuRow]) -> list[Summary]:
    """For each group: against each peer, and against the better of all peers case by case. Reliable rows only."""
    found = []
    for group, belongs in GROUPS.items():
        members = [row for row in rows if belongs(row) and row.ratio is not None and row.reliable]
        names = list(dict.fromkeys(row.peer_name for row in members))
        lists = {str(name): [row for row in members if row.peer_name == name] for name in names}
        if len(names) > 1:
            lists["the better of them"] = against_best_peer(members)
        for peer, chosen in lists.items():
            ratios = [row.ratio for row in chosen if row.ratio is not None]
            mean = geometric_mean(ratios)
            if mean is not None:
                worst = min(chosen, key=lambda row: row.ratio or math.inf)
                losses = sum(ratio < 1 for ratio in ratios)
                found.append(Summary(group=group, peer=peer, mean=mean, count=len(ratios), losses=losses, worst=worst))
    return found
