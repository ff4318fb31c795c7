from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import headline_chart

ROOT = Path(__file__).resolve().parents[2]


def test_every_line_of_the_chart_is_recorded(tmp_path: Path) -> None:
    report = json.loads(headline_chart.SOURCE.read_text())
    found = headline_chart.speeds(report["rows"])
    assert all(found.values())
    assert max(found["auto"]) == max(found["stream all"]) == 524288
    assert max(found["vLLM alone, KV on the device"]) <= headline_chart.GPU_TOKENS == 32768
    headline_chart.draw(report, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000


def test_the_help_explains_the_script() -> None:
    script = ROOT / "benchmarks" / "headline_chart.py"
    result = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=60)
    assert "Writes: " in result.stdout
