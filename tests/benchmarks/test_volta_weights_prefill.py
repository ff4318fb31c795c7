"""benchmarks/volta_weights_prefill.py: the launcher's choice, and what many rows must reach."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    import volta_weights_prefill

    return [row.model_dump() for row in volta_weights_prefill.counted()]


def test_the_launcher_takes_the_faster_way(rows: list[dict[str, Any]]) -> None:
    """One choice for each format: it costs less than one turn more than the best choice for each matrix."""
    turn = {row["case"].split(" (")[0]: row["turns_us"] for row in rows if row["case"].endswith(" 16 rows")}
    large = [row for row in rows if "o TP" not in row["case"]]  # small matrices, whose launches take longest
    assert len(large) == 3 * 6 * 10
    for row in large:
        best = min(row["turns_us"], row["unpacked_us"])
        assert row[f"{row['chosen']}_us"] <= best + turn[row["case"].split(" (")[0]], row["case"]
    assert {row["chosen"] for row in large if row["case"].endswith(" 64 rows")} == {"turns"}


def test_1024_rows_reach_80_percent_of_fp16(rows: list[dict[str, Any]]) -> None:
    many = [row for row in rows if int(row["case"].split()[-2]) >= 1024]
    assert len(many) == 3 * 3 * 9
    for row in many:
        fractions = (row["fraction_of_limit"], row["fraction_of_dense_at_85"], row["fraction_of_dense_at_95"])
        assert min(fractions) >= 0.8, row["case"]


@pytest.mark.parametrize("weight", ["int4", "int8", "e4m3"])
def test_unpacking_takes_as_long_as_its_bytes(weight: str) -> None:
    """Whole sectors are written, and instructions do not take longer than memory."""
    import volta_weights_prefill as script

    moved, possible = script.unpacked(weight, 2048, 64)
    assert moved <= 1.01 * (script.weight_bytes(weight, 2048, 64) + 2 * 2048 * 64)
    assert possible <= 1.05 * moved


def test_times() -> None:
    import volta_weights_prefill as script

    found = script.times("int4", 1024, 2048, 1000, 1e-5, 50.0)
    weights = 1024 * 2048
    assert found.turns == pytest.approx(63e-5)
    assert found.dense == pytest.approx(2 * 1000 * weights / 50e12)
    assert found.unpacked == pytest.approx(found.dense + (2.5 * weights + 4 * 8 * 2048) / 817e9, rel=1e-3)
    assert found.chosen == found.unpacked
    few = script.times("int4", 1024, 2048, 16, 1e-5, 50.0)
    assert few.dense > 2 * weights / 817e9, "fp16 weights are read"
    assert few.chosen == few.turns == 1e-5
