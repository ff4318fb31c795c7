from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from fastattention_vllm.bench.report import Report, Row, compared, geometric_mean, report

KEYS = "case metric unit ours peer_name peer ratio limit fraction_of_limit".split()


def test_a_ratio_is_above_one_where_ours_is_better() -> None:
    rate = compared("c", "decode rate", "GB/s", 30.0, better="higher", peer_name="p", peer=20.0, limit=40.0)
    assert (rate.ratio, rate.fraction_of_limit) == (1.5, 0.75)
    time = compared("c", "serve time", "ms", 20.0, better="lower", peer_name="p", peer=30.0, limit=10.0)
    assert (time.ratio, time.fraction_of_limit) == (1.5, 0.5)


@pytest.mark.parametrize(("ours", "peer"), [(None, 1.0), (1.0, None), (0.0, 1.0), (1.0, 0.0)])
def test_without_both_sides_there_is_no_ratio(ours: float | None, peer: float | None) -> None:
    assert compared("c", "decode rate", "GB/s", ours, better="higher", peer_name="p", peer=peer).ratio is None


def test_a_benchmarks_own_fields_come_after_the_common_ones(tmp_path: Path) -> None:
    found = report([compared("c", "decode", "ms", 1.0, better="lower", **{"rounds ms": [1.0]})], "a CPU", complete=True)
    found.write(tmp_path / "file.json")
    read = Report[Row].model_validate_json((tmp_path / "file.json").read_text())
    assert read == found
    assert list(read.model_dump()) == ["hardware", "versions", "date", "rows", "complete"]
    assert {"python", "torch"} <= set(read.versions)
    assert list(read.rows[0].model_dump()) == [*KEYS, "rounds ms"]


def test_a_row_without_a_unit_is_refused() -> None:
    with pytest.raises(ValidationError, match="unit"):
        Row.model_validate({"case": "c", "metric": "decode", "ours": 1.0})


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([]) is None
