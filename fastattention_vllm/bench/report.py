"""The one form of all results: rows with the same nine fields first, in a report with hardware, versions and date.

Used by: every script in benchmarks/, `fastattention bench` and `make soak`. benchmarks/results holds such files.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from fastattention_vllm.bench import machine


class Row(BaseModel):
    """One case: ours, the peer beside it and the limit, where there are any. Rows that lose stay.

    A benchmark may add fields of its own after these.
    """

    model_config = ConfigDict(extra="allow")

    case: str
    metric: str
    """Begins with the phase: decode, prefill, cooperative, overlap or serve."""
    unit: str
    ours: float | None
    peer_name: str | None = None
    peer: float | None = None
    ratio: float | None = None
    """Above 1, ours is better."""
    limit: float | None = None
    """The best value that the machine (or the task) allows, in ``unit``."""
    fraction_of_limit: float | None = None


AnyRow = TypeVar("AnyRow", bound=Row)


class Report(BaseModel, Generic[AnyRow]):
    """A results file. A benchmark may add fields of its own."""

    model_config = ConfigDict(extra="allow")

    hardware: str | dict[str, str]
    versions: dict[str, str]
    date: str
    rows: list[AnyRow]

    def write(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=1) + "\n")


def compared(
    case: str,
    metric: str,
    unit: str,
    ours: float | None,
    *,
    better: Literal["higher", "lower"],
    peer_name: str | None = None,
    peer: float | None = None,
    limit: float | None = None,
    **more: Any,
) -> Row:
    """A row with its ratio and its fraction of the limit. ``more``: fields of this benchmark alone."""
    return Row(
        case=case,
        metric=metric,
        unit=unit,
        ours=ours,
        peer_name=peer_name,
        peer=peer,
        ratio=advantage(ours, peer, better),
        limit=limit,
        fraction_of_limit=advantage(ours, limit, better),
        **more,
    )


def advantage(ours: float | None, other: float | None, better: Literal["higher", "lower"]) -> float | None:
    """How many times as good ``ours`` is."""
    if not ours or not other:
        return None
    return ours / other if better == "higher" else other / ours


def report(
    rows: Sequence[Row], hardware: str | dict[str, str], versions: Mapping[str, str] | None = None, **more: Any
) -> Report[Row]:
    """A report of today. ``more``: fields of this benchmark alone."""
    found = dict(machine.versions() if versions is None else versions)
    return Report[Row](hardware=hardware, versions=found, date=today(), rows=list(rows), **more)


def today() -> str:
    return datetime.date.today().isoformat()


def geometric_mean(ratios: Iterable[float]) -> float | None:
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None
