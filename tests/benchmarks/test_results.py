"""One reader can read every file in benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))
FIELDS = {"case", "metric", "unit", "ours", "peer_name", "peer", "ratio", "limit", "fraction_of_limit"}
METRICS = ("decode", "prefill", "cooperative", "overlap", "serve")
NO_PHASE = {"2026-11-22-ascend-mask-memory": "memory of the mask"}
"""Metrics of memory, which belong to no kind of computation."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_row_has_the_fields_of_a_result(path: Path) -> None:
    report = json.loads(path.read_text())
    assert {"hardware", "versions", "date", "rows"} <= set(report)
    assert report["rows"]
    for row in report["rows"]:
        assert set(row) >= FIELDS, row
        assert row["metric"].startswith(NO_PHASE.get(path.stem, METRICS)), row
        assert row["ratio"] is None or None not in (row["ours"], row["peer"], row["peer_name"]), row
        assert row["fraction_of_limit"] is None or None not in (row["ours"], row["limit"]), row
