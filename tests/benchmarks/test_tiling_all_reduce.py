"""benchmarks/tiling_all_reduce.py on two ranks of this CPU: it runs, and its rows and picture are complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiling_all_reduce
import tiling_layer

from tests.benchmarks.conftest import BENCHMARKS


def run(*arguments: str, script: str = "tiling_all_reduce.py", **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=500
    )


def test_every_variant_has_a_row_and_the_timeline_is_drawn(tmp_path: Path) -> None:
    file, picture = tmp_path / "rows.json", tmp_path / "lanes.png"
    layer = ["--links", "gloo", "--tiny", "--tokens", "256", "1000", "--min-tokens", "512", "--rounds", "1"]
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
        assert row["case"] == f"{tokens} tokens, tiny {row['layer']}, 2 ranks, gloo, {row['way']}"
        assert row["ours"] == row["ms"]
        assert row["ratio"] == (None if row["way"] == "plain" else row["speedup"])
        assert row["limit"] == max(row["matmul ms"], row["all-reduce ms"])
    assert len(ways[256, "auto"]["blocks"]) == 1, "auto must not cut so few tokens"
    assert len(ways[1000, "8"]["blocks"]) == 8
    lanes = next(row["timeline"] for row in report["rows"] if row.get("tokens") == 1000 and "timeline" in row)
    for matmul, reduce in zip(lanes["matmul"], lanes["all-reduce"], strict=True):
        assert matmul[0] <= matmul[1] <= reduce[1]
        assert reduce[0] >= matmul[1], "no block may be summed before it is computed"
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("script", ["tiling_all_reduce", "tiling_layer", "first_token"])
def test_links_between_gpus_are_refused_without_gpus(script: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = run(
        "--links", "gloo", "host", "--ranks", "2", "--json", str(file), script=f"{script}.py", CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == 2
    assert done.stdout == ""
    said = "2 ranks need as many NVIDIA GPUs, torch can use 0 here; `--links gloo` needs none."
    assert done.stderr == f"{script}: {said}\n"
    assert not file.exists()


def test_cuts_of_a_sweep_are_compared_with_the_matching_plain_layer() -> None:
    place = {"link": "host", "ranks": 2, "model": "8B", "layer": "o_proj"}
    plain = place | {"tokens": 512, "matmul ms": 3.0, "all-reduce ms": 5.0, "plain ms": 8.0}
    other = plain | {"tokens": 256, "plain ms": 4.0}
    cuts = (
        place
        | {"tokens": 512, "lane": "nccl", "sum ms": 5.0}
        | dict.fromkeys(tiling_all_reduce.SHAPES, 7.0)
        | {"even 4": 6.4}
    )
    found = tiling_all_reduce.describe(plain, [other])
    assert (found.ours, found.peer, found.limit, found.fraction_of_limit) == (8.0, None, 5.0, 5 / 8)
    found = tiling_all_reduce.describe(cuts, [other, plain])
    assert (found.ours, found.peer_name, found.peer, found.ratio) == (6.4, "plain", 8.0, 8 / 6.4)
    assert found.case == "512 tokens, 8B o_proj, 2 ranks, host, nccl, the fastest cut: even 4"


def test_variants_of_a_whole_layer_are_compared_with_the_plain_one() -> None:
    plain = {"link": "host", "ranks": 2, "model": "8B", "tokens": 512, "way": "plain", "ms": 8.0}
    before = [{"note": "a lane is missing"}, plain | {"tokens": 256, "ms": 4.0}, plain]
    found = tiling_layer.describe(plain | {"way": "full", "ms": 5.0}, before)
    assert (found.metric, found.ours, found.peer, found.ratio) == ("overlap layer", 5.0, 8.0, 1.6)
    assert tiling_layer.describe(plain, before[:-1]).peer is None
