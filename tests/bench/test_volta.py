"""`fastattention bench volta` without a GPU: results come from the simulated V100, times from a clock set by tests."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from fastattention_vllm.attention import xformers
from fastattention_vllm.attention.volta import images, kernels
from fastattention_vllm.bench import command, volta
from fastattention_vllm.bench import gpu as gpus
from fastattention_vllm.bench.cases import Case
from fastattention_vllm.bench.contender import Bound, Call
from fastattention_vllm.bench.volta_contenders import OURS, Layer, Sdpa, contenders
from tests.attention.volta import simulated_gpu
from tests.integration.cuda.documented_xformers import memory_efficient_attention

PREFILL = Case("prefill", "fp16", "fp16", 2, 2, 64, 48, 48, batch=2)
FULL = dataclasses.replace(PREFILL, causal=False)
DECODE = Case("decode", "fp16", "fp16", 8, 2, 64, 160, batch=2)
L2_BYTES = 3 * DECODE.kv_bytes // volta.MIN_ROTATED


class Clock:
    """Replaces the GPU's clock."""

    device = torch.device("cpu")

    def __init__(self, capturable: bool = False) -> None:
        self.now, self.capturable, self.frees = 0.0, capturable, 0

    def seconds(self, call: Callable[[], Any]) -> float:
        begin = self.now
        call()
        return self.now - begin

    def captured(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        if not self.capturable:
            raise RuntimeError("operation not permitted when stream is capturing")
        return lambda: [call() for call in calls]

    def free(self) -> None:
        self.frees += 1


class Played:
    """A contender that takes each of ``takes`` seconds on ``clock`` in turn and is right, or raises ``error``."""

    def __init__(self, name: str, clock: Clock, takes: Sequence[float], error: Exception | None = None) -> None:
        self.name = self.peer = name
        self.clock, self.takes, self.error, self.calls = clock, list(takes), error, 0
        self.off = 0.0

    def why_not(self, case: Case) -> str | None:
        return None

    def bind(self, case: Case, query: torch.Tensor, layers: Sequence[Layer]) -> Bound:
        right = Sdpa("math", torch.nn.attention.SDPBackend.MATH).bind(case, query, layers)

        def play(call: Call) -> Call:
            def run() -> torch.Tensor:
                if self.error is not None:
                    raise self.error
                self.clock.now += self.takes[self.calls % len(self.takes)]
                self.calls += 1
                return right.shaped(call()) + self.off

            return run

        return Bound([play(call) for call in right.calls])


# --- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        PREFILL,
        Case("prefill", "fp16", "fp16", 1, 1, 64, 64, 64, causal=False),
        DECODE,
        Case("decode", "fp16", "fp16", 2, 2, 64, 16),
    ],
    ids=str,
)
def test_all_contenders_compute_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    grids = simulated_gpu.use(monkeypatch)
    monkeypatch.setattr(gpus, "interleave", lambda gpu, timed, rounds: [one.samples.clean.append(1.0) for one in timed])
    rows = {row.contender: row for row in volta.measure(case, contenders(), Clock(), 1, 0)}
    assert len(rows) == 7
    kernels_used = {name for name, _ in grids}
    expected = {"fa_volta_prefill"} if case.kind == "prefill" else {"fa_volta_decode", "fa_volta_combine"}
    assert kernels_used == expected
    for name in (OURS, "ours, pages of 16", "torch SDPA, math", "eager (Hugging Face)"):
        assert rows[name].note == ""
        assert rows[name].error is not None
        assert rows[name].error < 2e-3
    # On CPUs, torch has no memory-efficient kernel and xformers is missing; these rows give the reason.
    assert rows["torch SDPA, mem-efficient"].value is None
    assert rows["torch SDPA, mem-efficient"].note
    if xformers.version() is None:
        assert rows["xformers"].note.startswith("xformers is not installed")


class LowerTriangularMask:
    """As documented by xformers."""

    def materialize(self, shape: tuple[int, int]) -> torch.Tensor:
        return torch.full(shape, -torch.inf).triu(1)


class NoMask:
    def materialize(self, shape: tuple[int, int]) -> torch.Tensor:
        return torch.zeros(shape)


@pytest.mark.parametrize("case", [PREFILL, DECODE], ids=str)
def test_arguments_passed_to_xformers(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked with the equivalent PyTorch code from xformers' documentation, because xformers computes only on GPUs."""

    def documented(query: Any, key: Any, value: Any, attn_bias: Any = None, scale: float | None = None) -> Any:
        return memory_efficient_attention(query, key, value, attn_bias or NoMask(), scale=scale)

    ops = SimpleNamespace(memory_efficient_attention=documented, LowerTriangularMask=LowerTriangularMask)
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)  # type: ignore[arg-type]
    monkeypatch.setattr(xformers, "version", lambda: "0.0.34")
    (one,) = (one for one in contenders() if one.name == "xformers")
    assert one.why_not(case) is None
    query, layers = volta._tensors(case, torch.device("cpu"), 0)
    assert volta.error_of(case, query, layers[0], one.bind(case, query, layers).answer()) < 2e-3


def test_errors_cover_only_rows_that_a_causal_mask_keeps() -> None:
    query = torch.randn(2 * 48, 2, 64, dtype=torch.float16)
    layer = Layer(*(torch.randn(2, 48, 2, 64, dtype=torch.float16) for _ in range(2)))
    sdpa = Sdpa("math", torch.nn.attention.SDPBackend.MATH)
    right = {case: sdpa.bind(case, query, [layer]).answer() for case in (PREFILL, FULL)}
    for case in (PREFILL, FULL):
        assert volta.error_of(case, query, layer, right[case]) < 2e-3
    assert volta.error_of(PREFILL, query, layer, right[FULL]) > 0.1
    right[FULL][48 + 47, 1, 3] = torch.nan
    assert volta.error_of(FULL, query, layer, right[FULL]) == float("inf")


# --- times -----------------------------------------------------------------------------------------------------------


def test_medians_ratios_and_units() -> None:
    clock = Clock()
    ours, other = Played(OURS, clock, [0.02]), Played("other", clock, [0.05])
    found = {row.contender: row for row in volta.measure(PREFILL, [ours, other], clock, 5, 0)}
    assert found[OURS].milliseconds == pytest.approx(20.0)
    assert found["other"].milliseconds == pytest.approx(50.0)
    assert found["other"].ours_is == pytest.approx(2.5)
    assert found[OURS].ours_is is None
    assert found["other"].metric == "prefill rate"
    assert (found["other"].ours, found["other"].peer_name) == (found[OURS].value, "other")
    assert (found["other"].peer, found["other"].ratio) == (found["other"].value, found["other"].ours_is)
    assert (found[OURS].ours, found[OURS].peer_name, found[OURS].ratio) == (found[OURS].value, None, None)
    pairs = 48 * 49 / 2
    assert found[OURS].value == pytest.approx(4 * 64 * pairs * 2 * 2 / 0.02 / 1e12)
    assert found[OURS].samples == 5
    assert found[OURS].iqr == pytest.approx(0, abs=1e-9)
    assert FULL.flops == 4 * 64 * 48 * 48 * 2 * 2


def test_decoding_rotates_and_counts_a_layer() -> None:
    for capturable in (False, True):
        clock = Clock(capturable)
        (row,) = volta.measure(DECODE, [Played(OURS, clock, [0.01])], clock, 3, L2_BYTES)
        assert row.captured is capturable
        assert row.milliseconds == pytest.approx(10.0)  # the time of one of the three layers
        assert row.value == pytest.approx(4 * 64 * 160 * 2 * 2 / 0.01 / 1e9)
    assert len(volta._tensors(DECODE, clock.device, L2_BYTES)[1]) == 3
    assert len(volta._tensors(PREFILL, clock.device, L2_BYTES)[1]) == 1


def test_samples_take_turns_and_a_slow_one_is_not_the_median() -> None:
    clock, order = Clock(), []

    def timed(name: str, takes: list[float]) -> gpus.Timed:
        def call() -> None:
            order.append(name)
            clock.now += takes[sum(seen == name for seen in order) % len(takes)]

        return gpus.Timed(name, call)

    a, b = timed("a", [0.1]), timed("b", [0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.9])
    gpus.interleave(clock, [a, b], 5)
    assert order[4:] == ["a", "b", "b", "a"] * 2 + ["a", "b"]
    assert (a.samples.median, b.samples.median) == (pytest.approx(0.1), pytest.approx(0.2))
    assert max(b.samples.clean) == pytest.approx(0.9)
    assert b.repeats == 1
    slow = timed("slow", [30.0])
    gpus.interleave(clock, [slow], 9)
    assert slow.samples.clean == [pytest.approx(30.0)] * 3
    quick = gpus.Timed("quick", lambda: setattr(clock, "now", clock.now + 1e-4))
    gpus.interleave(clock, [quick], 2)
    assert quick.repeats == 200
    assert quick.samples.median == pytest.approx(1e-4)


# --- failures --------------------------------------------------------------------------------------------------------


def test_failures_are_reported_as_rows() -> None:
    clock = Clock()
    wrong = Played("wrong", clock, [0.01])
    wrong.off = 0.5
    everyone = [
        Played(OURS, clock, [0.02]),
        Played("large", clock, [0.02], torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128 GiB")),
        Played("missing", clock, [0.01], RuntimeError("No available kernel. Aborting execution.\nmore")),
        wrong,
    ]
    rows = {row.contender: row for row in volta.measure(PREFILL, everyone, clock, 3, 0)}
    assert rows["large"].note == "out of memory."
    assert rows["missing"].note == "RuntimeError: No available kernel. Aborting execution. more"
    assert rows["wrong"].note.startswith("wrong by 5")
    assert rows["wrong"].ours_is is None
    assert (rows["wrong"].peer, rows["wrong"].ratio) == (None, None)
    assert all(row.ours == rows[OURS].value for row in rows.values())
    assert rows["wrong"].value is not None
    assert all(rows[name].value is None for name in ("large", "missing"))
    assert rows[OURS].note == ""
    assert clock.frees >= len(everyone)


def test_no_memory_for_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: object, **named: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    clock = Clock()
    monkeypatch.setattr(torch, "randn", none)
    (row,) = volta.measure(PREFILL, [Played(OURS, clock, [1.0])], clock, 1, 0)
    assert row.note == "out of memory before anything was computed."
    assert row.value is None


def run_command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command.app, ["bench", "volta", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "many"], "--tokens is 'many'"),
        (["--tokens", "8"], "a length is 8"),
        (["--head-size", "72"], "the head size is 72"),
        (["--contender", "nobody"], "there is no contender 'nobody'"),
    ],
)
def test_bad_options(arguments: list[str], said: str) -> None:
    status, output = run_command(*arguments)
    assert status == 2
    (line,) = output.splitlines()
    assert line.startswith("fastattention bench: ")
    assert said in line


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "result.json"
    status, output = run_command("--json", str(out))
    assert status == 2
    (line,) = output.splitlines()
    assert line.startswith("fastattention bench: there is no NVIDIA GPU that torch can use")
    assert not out.exists()


def with_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla P100")


def test_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, (6, 0))
    status, output = run_command()
    assert status == 2
    assert output == (
        "fastattention bench: Tesla P100 has compute capability 6.0, the kernels need 7.0 (V100) or newer.\n"
    )


def test_kernels_that_are_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_gpu(monkeypatch, (7, 0))
    monkeypatch.setattr(gpus, "wake", lambda: None)
    monkeypatch.setattr(images, "IMAGES", tmp_path)
    status, output = run_command()
    assert status == 2
    (line,) = output.splitlines()
    assert line.startswith("fastattention bench: The Volta kernels are not built")
    assert "make volta" in line


# --- the report ------------------------------------------------------------------------------------------------------


def test_from_the_command_line_to_the_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulated_gpu.use(monkeypatch)
    monkeypatch.setattr(volta, "why_not", lambda kernels: None)
    monkeypatch.setattr(gpus, "CudaGpu", lambda: WallClock())
    monkeypatch.setattr(gpus, "hardware", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"L2_cache_size": 1})
    )
    out = tmp_path / "result.json"
    status, output = run_command(
        *("--tokens", "16", "--context", "16", "--batch", "1", "--heads", "1", "--rounds", "1"),
        *("--contender", "eager", "--contender", "torch SDPA, math", "--json", str(out)),
    )
    assert status == 0, output
    assert "m8n8k4 emulated" in output
    assert "NVIDIA H200" in output
    found = volta.VoltaReport.model_validate_json(out.read_text())
    assert found.kernels == "sm_70, machine code, m8n8k4 emulated"  # the simulated GPU loads machine code
    assert {"torch", "python"} <= found.versions.keys()
    assert [row.case for row in found.rows[::3]] == [
        "prefill fp16 (1,1,64) 16 not causal",
        "prefill fp16 (1,1,64) 16",
        "decode fp16 (1,1,64) 16 b1",
    ]
    assert all(row.value for row in found.rows)
    assert json.loads(out.read_text())["date"]


class WallClock(Clock):
    def seconds(self, call: Callable[[], Any]) -> float:
        call()
        return 0.1


def test_the_table_shows_failures(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    everyone = [
        Played(OURS, clock, [0.02]),
        Played("quicker", clock, [0.01]),
        Played("eager", clock, [0.02], torch.OutOfMemoryError("")),
    ]
    rows = volta.measure(PREFILL, everyone, clock, 3, 0)
    found = volta.VoltaReport(
        hardware={"gpu": "Tesla V100"}, kernels="machine code of sm_70", versions={}, date="", rows=rows
    )
    volta.print_report(Console(width=150), found)
    printed = capsys.readouterr().out
    assert "out of memory" in printed
    assert "(0.50x)" in printed
    assert "1 lost" in printed
    assert "Tesla V100, ours: machine code of sm_70" in printed


def test_a_wrong_result_of_ours_sets_the_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, console = Clock(), Console(file=(tmp_path / "printed").open("w"))
    monkeypatch.setattr(gpus, "CudaGpu", lambda: clock)
    monkeypatch.setattr(gpus, "hardware", lambda: {"gpu": "Tesla V100"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"L2_cache_size": 1})
    )
    for name, off, status in ((OURS, 0.0, 0), ("other", 0.5, 0), (OURS, 0.5, 1)):
        everyone = [Played(OURS, clock, [0.02]), Played("other", clock, [0.02])]
        next(one for one in everyone if one.name == name).off = off
        assert volta.run([PREFILL], everyone, 1, tmp_path / "result.json", console) == status


def test_how_kernels_run() -> None:
    v100, ptx, turing = kernels.Target(70, "cubin"), kernels.Target(70, "ptx"), kernels.Target(75, "ptx")
    assert volta.how_kernels_run(v100, (7, 0)) == "sm_70, machine code"
    assert volta.how_kernels_run(kernels.Target(75, "cubin"), (7, 5)) == "sm_75, machine code"
    assert volta.how_kernels_run(ptx, (9, 0)) == "sm_70, compiled from PTX by the driver, m8n8k4 emulated"
    assert volta.how_kernels_run(turing, (9, 0)) == "sm_75, compiled from PTX by the driver"


def test_unknown_kernel_names() -> None:
    assert volta.why_not("sm_75") == "--kernels is 'sm_75'; there are auto, ptx, ptx-sm_75."


def test_the_paper_s_set_up() -> None:
    found = volta.cases([1024, 2048], [4096], batch=8, heads=32, head_size=64)
    assert str(found[0]) == "prefill fp16 (32,32,64) 1K b8 not causal"
    assert [case.num_kv_heads for case in found[4:]] == [32, 8, 4]
