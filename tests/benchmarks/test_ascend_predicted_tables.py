"""docs/ascend.md has the tables of the recorded predictions."""

from __future__ import annotations

import json
from pathlib import Path

import ascend_predicted_tables as tables

ROOT = Path(__file__).resolve().parents[2]
RECORDED = json.loads(tables.SOURCE.read_text())


def test_the_page_has_the_recorded_tables_and_the_chart() -> None:
    page = (ROOT / "docs" / "ascend.md").read_text()
    made = list(tables.tables(RECORDED))
    assert len(made) == 5
    for table in made:
        assert table in page, f"the page lacks this table:\n{table}"
    assert f"({Path('..') / tables.CHART.relative_to(ROOT)})" in page
    assert tables.CHART.exists()


def test_the_recorded_goals_are_met() -> None:
    assert len(RECORDED["goals"]) == 4
    assert all(goal["value"] >= goal["limit"] for goal in RECORDED["goals"])


def test_the_recorded_rows_say_that_they_are_predicted() -> None:
    assert "predicted" in RECORDED["hardware"]
    assert "Not yet run on hardware" in RECORDED["note"]


def test_the_chart_has_every_form(tmp_path: Path) -> None:
    tables.draw(RECORDED, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000
