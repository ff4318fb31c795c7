"""What a run found: rows, as every script in benchmarks/ writes them."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable

from pydantic import BaseModel, ConfigDict

from fastattention_vllm.bench import machine


class Row(BaseModel):
    """One case and one peer. ``ratio`` > 1 means that ours is better; lost rows stay."""

    model_config = ConfigDict(extra="forbid")

    case: str
    metric: str
    unit: str
    ours: float | None
    peer_name: str | None
    peer: float | None
    ratio: float | None
    limit: float | None
    """What the roofline allows, in ``unit``."""
    fraction_of_limit: float | None

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
    notes: list[str] = []
    """What was wrong, skipped, cut short or disturbed, in sentences."""


class Report(BaseModel):
    hardware: str
    versions: dict[str, str]
    date: str
    rows: list[Row]


def report(rows: list[Row], threads: int) -> Report:
    today = datetime.date.today().isoformat()
    return Report(hardware=machine.hardware(threads), versions=machine.versions(), date=today, rows=rows)


def geometric_mean(ratios: Iterable[float]) -> float | None:
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


GROUPS: dict[str, Callable[[Row], bool]] = {
    "decode": lambda row: row.case.startswith("decode"),
    "prefill bf16": lambda row: row.case.startswith("prefill bf16"),
    "prefill fp16": lambda row: row.case.startswith("prefill fp16"),
    "prefill fp32": lambda row: row.case.startswith("prefill fp32"),
}


def against_best_peer(rows: list[Row]) -> list[Row]:
    """For each case the row with the strongest peer, cases without any left out."""
    best: dict[tuple[str, int], Row] = {}
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
    worst: Row


def summaries(rows: list[Row]) -> list[Summary]:
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
