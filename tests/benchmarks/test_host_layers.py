"""What host_layers.py counts of drafted tokens, and its chart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_layers_plot
import pytest
from host_layers_drafts import Drafts

from tests.benchmarks.conftest import BENCHMARKS


class Engine:
    def __init__(self) -> None:
        self.drafts, self.accepted = 2, 5

    def get_metrics(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=self.accepted),
            SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self.drafts),
            SimpleNamespace(name="vllm:e2e_request_latency_seconds"),  # a histogram has no value
        ]


def test_accepted_drafts_are_counted_from_the_start_of_a_way() -> None:
    engine = Engine()
    drafts = Drafts(engine)
    assert drafts.accepted_per_step() is None
    engine.drafts, engine.accepted = 12, 35
    assert drafts.accepted_per_step() == pytest.approx(3)


def test_the_chart_has_a_line_for_each_way_and_the_limit_of_16_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(host_layers_plot.plots, "save", lambda path, title, panels, dress: drawn.update(panels))
    names = ("shared-graph-31", "shared-graph-256k", "int8-256k")
    results = [BENCHMARKS / "results" / f"2026-11-26-host-layers-h100-{name}.json" for name in names]
    host_layers_plot.draw(tmp_path / "chart.png", results)
    lines = drawn["decoding"]
    assert set(lines) == {
        *("pieces", "graph", "shared graph", "auto", "int8 on the host, pieces", "int8 on the host, graph"),
        host_layers_plot.LIMIT,
    }
    assert [tokens for tokens, _ in lines["auto"]] == [16384, 32768, 65536, 262144]
    assert {tokens for tokens, _ in lines[host_layers_plot.LIMIT]} == {16384, 32768, 65536, 262144}
