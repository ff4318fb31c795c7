"""benchmarks/first_token.py: its predictions and rows, and a run on two ranks of this CPU."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import first_token_engines
import first_token_prediction
import first_token_rows
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.parallel.pipeline import Times
from tests.benchmarks.conftest import BENCHMARKS
from tests.parallel.models import AFFINE_TIMES, TIMES, affine

TOKENS = 8192
OPTIONS = argparse.Namespace(tiny=False, model="8B", layers=8, tokens=TOKENS, graphs=False)


@given(of_two=TIMES, rows=st.integers(1, 20000))
def test_sums_over_two_ranks_equal_the_measurement(of_two: Times, rows: int) -> None:
    assert first_token_prediction.over(2, of_two)(rows) == pytest.approx(of_two(rows))


def test_sums_over_more_move_more_bytes_in_more_steps() -> None:
    step, per_row = 50e-6, 1e-6
    of_two = Times(tuple((rows, step + per_row * rows) for rows in (128, 1024, 8192)))
    for ranks in (4, 8):
        expected = (ranks - 1) * step + 2 * (ranks - 1) / ranks * per_row * 5000
        assert first_token_prediction.over(ranks, of_two)(5000) == pytest.approx(expected)
    of_four = first_token_prediction.over(4, of_two)
    assert first_token_prediction.over(8, of_four, 4)(5000) == pytest.approx(expected)


def test_sums_of_as_many_ranks_are_the_measured_ones() -> None:
    of_two, of_four = affine(0, 1e-6), affine(0, 5e-6)
    sums = {("nccl", 2): of_two, ("nccl", 4): of_four, ("copies", 2): of_two}
    found = first_token_prediction.Parts({}, sums, dict(zip(sums, (1.0, 1.5, 2.0), strict=True)))
    assert list(found.of(4)) == ["nccl", "copies"]
    times, slow = found.of(4)["nccl"]
    assert (times(TOKENS), slow) == (pytest.approx(of_four(TOKENS)), 1.5)
    assert found.of(2)["nccl"][0](TOKENS) == pytest.approx(of_two(TOKENS))
    assert found.of(8)["nccl"][0](TOKENS) == pytest.approx(of_four(TOKENS) * 7 / 6)
    assert found.of(4)["copies"][0](TOKENS) == pytest.approx(of_two(TOKENS) * 3 / 2)


def parts(matmul: Times, sums: Times, slowdown: float = 1.0) -> Any:
    names = [(name, ranks) for name in ("o_proj", "down_proj", "gate_up") for ranks in (1, 2, 4, 8)]
    return first_token_prediction.Parts(dict.fromkeys(names, matmul), {("nccl", 2): sums}, {("nccl", 2): slowdown})


@given(matmul=AFFINE_TIMES, sums=AFFINE_TIMES, slowdown=st.floats(1, 8), ranks=st.sampled_from([2, 4, 8]))
def test_tiling_is_never_predicted_to_lose_or_to_hide_more_than_there_is(
    matmul: Times, sums: Times, slowdown: float, ranks: int
) -> None:
    all_reduce = first_token_prediction.over(ranks, sums)(TOKENS)
    of_one = 8 * 2 * matmul(TOKENS) + 0.5
    found = first_token_prediction.predicted(parts(matmul, sums, slowdown), {1: of_one}, 8, TOKENS, ranks)
    off = found["off"]
    one, two = (min(count * matmul(TOKENS), all_reduce) for count in (1, 2))
    assert off - 8 * 2 * one * (1 + 1e-9) <= found["auto"] <= off
    assert off - 8 * (one + two) * (1 + 1e-9) <= found["full"] <= off
    assert off == pytest.approx(0.5 / ranks + 8 * 2 * (matmul(TOKENS) + all_reduce) + all_reduce)


def test_time_that_two_gpus_do_not_divide_is_constant() -> None:
    """0.1 s is spent on every rank, and 0.4 s is divided among the ranks."""
    matmul, sums = affine(0, 1e-7), affine(0, 2e-7)
    known = {
        ranks: 8 * 2 * matmul(TOKENS) + (8 * 2 + 1) * first_token_prediction.over(ranks, sums)(TOKENS)
        for ranks in (2, 8)
    }
    measured = {1: 8 * 2 * matmul(TOKENS) + 0.5, 2: known[2] + 0.3}
    for ranks, rest in ((2, 0.3), (8, 0.15)):
        found = first_token_prediction.predicted(parts(matmul, sums), measured, 8, TOKENS, ranks)
        assert found["off"] == pytest.approx(rest + known[ranks])


def test_rows_compare_with_the_same_gpus_without_tiling() -> None:
    took = {
        (1, "off"): [0.2, 0.3, 0.1],
        (2, "off"): [0.16, 0.15, 0.17],
        (2, "full"): [0.128, 0.120, 0.130],
    }
    rows = first_token_rows.rows_of("host", took, OPTIONS)
    assert [(row.ours, row.peer, row.ratio) for row in rows] == [
        (200, None, None),
        (160, 200, 1.25),
        (128, 160, 1.25),
    ]
    assert {row.kind for row in rows} == {"measured"}
    assert rows[2].case == "8B layers, 8 of 32, 8192 tokens, 2 ranks, host, eager, tiling full"
    assert rows[1].peer_name == "1 rank, tiling off"
    assert rows[2].peer_name == "2 ranks, tiling off"


def test_predicted_rows_say_so() -> None:
    linear = affine(0, 1e-7)
    rows = first_token_rows.predicted_rows("host", {(1, "off"): [0.2]}, parts(linear, linear), OPTIONS)
    assert len(rows) == 9
    assert rows[2].ratio > rows[1].ratio > 1
    for row in rows:
        assert row.kind == "predicted"
        assert row.case.endswith("predicted")


def test_an_engine_that_does_not_start_is_ended_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "hangs.py"
    lines = [
        "import time",
        "def stuck_here():",
        "    print('stuck', flush=True)",
        "    time.sleep(600)",
        "stuck_here()",
    ]
    script.write_text("\n".join(lines))
    monkeypatch.setattr(first_token_engines, "__file__", str(script))
    engine = first_token_engines.Engine("one", {}, {}, tmp_path, tmp_path / "log")
    try:
        while "stuck" not in (tmp_path / "log").read_text():
            time.sleep(0.05)
        with pytest.raises(first_token_engines.EngineError, match=r"one did not answer in time(.|\n)*stuck_here"):
            engine.wait_until_ready(time.monotonic())
    finally:
        engine.end()


ANSWERS = """
import sys
from multiprocessing.connection import Client
with Client(sys.argv[1], "AF_UNIX") as parent:
    parent.send("ready")
    while (prompt := parent.recv()) is not None:
        parent.send((len(prompt), 1))
"""


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[first_token_engines.Engine]:
    """A process that answers a prompt with its length in place of seconds."""
    script = tmp_path / "answers.py"
    script.write_text(ANSWERS)
    monkeypatch.setattr(first_token_engines, "__file__", str(script))
    engine = first_token_engines.Engine("one", {}, {}, tmp_path, tmp_path / "log")
    engine.wait_until_ready(time.monotonic() + 60)
    yield engine
    engine.end()


def test_a_paused_engine_answers_when_it_is_resumed(answering: first_token_engines.Engine) -> None:
    process = psutil.Process(answering._process.pid)
    for _ in range(2):
        answering.pause()
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        answering.resume()
        assert answering.ask([1, 2, 3], 60) == 3.0


def test_an_engine_that_has_ended_while_it_was_paused(answering: first_token_engines.Engine) -> None:
    answering.pause()
    answering._process.kill()
    answering._process.wait()
    answering.resume()
    with pytest.raises(first_token_engines.EngineError, match="one has ended"):
        answering.ask([1, 2, 3], 60)


def test_paused_engines_end_with_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    code = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import first_token_engines
folder = Path(sys.argv[2])
first_token_engines.__file__ = str(folder / "answers.py")
engine = first_token_engines.Engine("one", {}, {}, folder, folder / "log")
engine.wait_until_ready(time.monotonic() + 60)
engine.pause()
print(engine._process.pid, flush=True)
time.sleep(600)
"""
    (tmp_path / "answers.py").write_text(ANSWERS)
    command = [sys.executable, "-c", code, str(BENCHMARKS), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        engine = psutil.Process(int(benchmark.stdout.readline()))
        benchmark.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        while engine.status() != psutil.STATUS_ZOMBIE:  # an orphan may have no one who collects it
            time.sleep(0.05)


@pytest.mark.full
@pytest.mark.timeout(2000)
def test_every_engine_has_its_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    small = ["--tiny", "--tokens", "256", "--min-tokens", "128", "--layers", "2", "--rounds", "1", "--limit", "900"]
    command = [sys.executable, str(BENCHMARKS / "first_token.py"), "--links", "gloo", *small, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1900)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["complete"]
    assert list(report["parts"]) == ["gloo"]
    assert [row["kind"] for row in report["rows"]] == ["measured"] * 4 + ["predicted"] * 9
    assert "Tiling-AllReduce: 4 row-parallel layers in" in done.stdout
