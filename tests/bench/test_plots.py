from __future__ import annotations

import pytest

from fastattention_vllm.bench.plots import context_of, dtype_of, heads_of, panels, percent_of_roofline, speeds
from tests.bench.test_cpu_report import row

ROWS = [
    row("decode bf16 (32,8,128) 32K b1", 2.0, fraction_of_limit=0.9),
    row("decode bf16 (32,8,128) 4K b1", 0.5, fraction_of_limit=0.8),
    row("decode bf16 (8,1,64) 4K b1", 1.0, fraction_of_limit=0.7),
    row("decode fp16 (8,1,64) 4K b1", 1.0, fraction_of_limit=0.6),
]


def test_a_line_joins_cases_that_differ_only_in_context() -> None:
    found = panels(ROWS, dtype_of, heads_of, context_of, lambda row: [percent_of_roofline(row)])
    assert found == {"bf16": {"(32,8,128) b1": [(4096.0, 80.0), (32768.0, pytest.approx(90.0))]}}


def test_a_panel_shows_every_contender_and_lost_cases() -> None:
    found = panels(ROWS, lambda row: f"{dtype_of(row)} {heads_of(row)}", None, context_of, speeds)
    (lines,) = found.values()
    assert lines["torch SDPA"] == [(4096.0, 20.0), (32768.0, 5.0)]
    assert set(lines) == {"ours", "roofline", "torch SDPA"}


def test_disturbed_points_are_named_in_the_title() -> None:
    rows = [ROWS[0], ROWS[1].model_copy(update={"reliable": False})]
    assert list(panels(rows, dtype_of, heads_of, context_of, speeds)) == ["bf16 (disturbed)"]
