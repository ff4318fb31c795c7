"""benchmarks/ablation.py and cpu_variants.py: each variant really lacks its feature, and gains are above one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ablation_cpu
import ablation_h200
import ablation_row
import ablation_v100
import cpu_variants
import pytest
import volta_launches

from tests.benchmarks.conftest import BENCHMARKS


def test_a_gain_is_above_one_in_every_unit() -> None:
    assert ablation_row.row("x", "CPU", "case", "prefill", "ms", 30.0, 20.0, "measured").ratio == 1.5
    found = ablation_row.row("x", "CPU", "case", "decode", "tokens/s", 20.0, 30.0, "measured", source="file.json")
    assert (found.ratio, found.peer_name, found.source) == (1.5, "without x", "file.json")


@pytest.mark.parametrize("isa", ["amx", "avx512_bf16", "avx512", "avx2", "neon", "scalar"])
def test_each_edit_of_the_cpu_kernels_still_applies(isa: str, tmp_path: Path) -> None:
    sources = cpu_variants.KERNELS / "src"
    for number, edits in enumerate(
        [cpu_variants.EVERY_KEY, cpu_variants.rows_of_one_panel(isa), cpu_variants.one_tile(isa, 8192)]
    ):
        copy = tmp_path / str(number)
        shutil.copytree(sources, copy)
        cpu_variants.apply(edits, copy)
        changed = {path.name for path in sources.iterdir() if path.read_bytes() != (copy / path.name).read_bytes()}
        assert changed == {edit.file for edit in edits}
    table = (copy / "tuning.h").read_text()
    assert table.count(".kv_tile = 8192,") == 1
    with pytest.raises(RuntimeError, match="has 0 places like 'no such text'"):
        cpu_variants.apply([cpu_variants.Edit("plan.cpp", "no such text", "")], copy)


def talker(some: str) -> subprocess.Popen[str]:
    """Replaces a build: answers each line with these numbers."""
    line = f'{{"seconds": 1.0, "some": [{some}]}}'
    script = f"import sys\nfor _ in sys.stdin: print({line!r}, flush=True)"
    return subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_builds_that_compute_something_else_are_refused() -> None:
    took = ablation_cpu.in_turns({"": talker("0.5, 1"), "masks": talker("0.501, 1")})
    assert took == {"": [1.0] * ablation_cpu.ROUNDS, "masks": [1.0] * ablation_cpu.ROUNDS}
    for wrong in ("0.6, 1", "0.5, NaN"):
        with pytest.raises(SystemExit, match="without masks computes something else"):
            ablation_cpu.in_turns({"": talker("0.5, 1"), "masks": talker(wrong)})


@pytest.mark.full
def test_a_simulated_kernel_without_skipping_or_levels_is_correct_and_slower() -> None:
    every_key = ablation_v100.V100_EVERY_KEY + ablation_v100.V100_COMPARED
    seconds = [
        ablation_v100.v100_seconds(volta_launches, 512, 64, edits, one_panel)
        for edits, one_panel in (((), False), (ablation_v100.V100_COMPARED, False), (every_key, False), ((), True))
    ]
    assert min(seconds[1:]) > seconds[0]
    assert seconds[2] > seconds[1], "no skipping plus comparisons must cost more than comparisons"


def test_rows_of_earlier_runs_name_their_file(tmp_path: Path) -> None:
    assert ablation_h200.stored_rows(tmp_path) == []
    layer = {"link": "host", "ranks": 2, "model": "8B", "tokens": 8192}
    ways = {"plain": 8.0, "linear": 7.0, "full": 5.0}
    write(tmp_path / "2026-01-02-tiling-layer-host.json", [layer | {"way": w, "ms": ms} for w, ms in ways.items()])
    case = "8B layers, 8 of 32, 8192 tokens, 2 ranks, host, eager, tiling"
    tokens = [
        {"case": f"{case} off", "kind": "measured", "ours": 60.0, "peer": 90.0},
        {"case": f"{case} full", "kind": "measured", "ours": 40.0, "peer": 60.0},
        {"case": f"{case} full, predicted", "kind": "predicted", "ours": 30.0, "peer": 60.0},
    ]
    write(tmp_path / "2026-01-02-first-token-host.json", tokens)
    write(tmp_path / "2026-01-01-first-token-host.json", [row | {"peer": 50.0} for row in tokens])
    found = ablation_h200.stored_rows(tmp_path)
    assert [(row.strategy, row.ratio) for row in found] == [
        ("tiling-AllReduce (row-parallel layers)", 8 / 7),
        ("tiling-AllReduce (full form)", 1.6),
        ("tiling-AllReduce (full form)", 1.5),
    ]
    assert {row.source for row in found[:2]} == {"2026-01-02-tiling-layer-host.json"}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"rows": rows}))


def test_stored_results_can_be_read() -> None:
    found = ablation_h200.stored_rows(BENCHMARKS / "results")
    assert {row.strategy.split(" (")[0].split("'")[0] for row in found} >= {"tiling-AllReduce", "host layers"}
    for row in found:
        assert row.kind == "measured"
        assert (BENCHMARKS / "results" / row.source).is_file()


@pytest.mark.full  # it builds the kernels once per feature, which takes a quarter of an hour
@pytest.mark.timeout(3600)
def test_cpu_kernels_without_each_feature_build_and_compute_the_same(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, str(BENCHMARKS / "ablation.py"), "--where", "cpu", "--cpu-tokens", "1024"]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 8
    assert {row["kind"] for row in rows} == {"measured"}


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (None, 2, "{file} cannot be read: No such file or directory."),
        ("no JSON", 2, "{file} is no result of a benchmark: it has no rows."),
        ('{"rows": [{"case": "of another script"}]}', 1, "{file} was not written by this script's --json."),
        ('{"rows": [1]}', 1, "{file} was not written by this script's --json."),
    ],
)
def test_a_file_without_a_table_is_refused(content: str | None, code: int, said: str, tmp_path: Path) -> None:
    file = tmp_path / "earlier.json"
    if content is not None:
        file.write_text(content)
    command = [sys.executable, str(BENCHMARKS / "ablation.py"), "--from", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.endswith(f": {said.format(file=file)}\n")
    assert "Traceback" not in done.stderr
