"""benchmarks/tiling_all_reduce.py on two ranks of this CPU: that it runs, and that its rows and picture are whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tiling_all_reduce.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_every_way_has_its_row_and_the_timeline_is_drawn(tmp_path: Path) -> None:
    file, picture = tmp_path / "rows.json", tmp_path / "lanes.png"
    layer = ["--links", "gloo", "--tiny", "--tokens", "256", "1000", "--least-tokens", "512", "--rounds", "1"]
    done = run(*layer, "--json", str(file), "--timeline", str(picture))
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert report["complete"]
    ways = {(row["tokens"], row["way"]): row for row in report["rows"] if "way" in row}
    assert set(ways) == {(256, way) for way in ("plain", "auto", "2", "4", "8")} | {
        (1000, way) for way in ("plain", "auto", "2", "4", "8")
    }
    for (tokens, _), row in ways.items():
        assert sum(row["blocks"]) == tokens
        assert row["speedup"] == row["plain ms"] / row["ms"]
        assert row["error"] < 1e-5
    assert len(ways[256, "auto"]["blocks"]) == 1, "fewer tokens than auto cuts"
    assert len(ways[1000, "8"]["blocks"]) == 8
    lanes = next(row["timeline"] for row in report["rows"] if row.get("tokens") == 1000 and "timeline" in row)
    for matmul, reduce in zip(lanes["matmul"], lanes["all-reduce"], strict=True):
        assert matmul[0] <= matmul[1] <= reduce[1]
        assert reduce[0] >= matmul[1], "no block is summed before it is there"
    assert picture.read_bytes()[:4] == b"\x89PNG"
