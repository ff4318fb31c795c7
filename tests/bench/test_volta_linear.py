"""`fastattention bench volta --weights` on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from fastattention_vllm.bench import command, exllama, volta_linear
from fastattention_vllm.bench import gpu as gpus
from fastattention_vllm.bench.contender import Call
from fastattention_vllm.bench.volta_linear import FORMATS, OURS, Dense, Exllama, Ours, Product, contenders, measure
from fastattention_vllm.linear.volta import kernels
from fastattention_vllm.linear.weights import QuantisedMatrix, WeightFormat
from tests.bench.test_volta import Clock
from tests.linear import oracle

SMALL = [Product(form, "down", 256, 136, rows) for form in FORMATS for rows in (2, 100)]


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is then its reference."""
    monkeypatch.setattr(kernels, "load", lambda form: None)
    monkeypatch.setattr(gpus, "interleave", lambda gpu, timed, rounds: [one.samples.clean.append(1.0) for one in timed])


def gptq_gemm(x: Any, words: Any, zeros: Any, scales: Any, order: Any, shuffled: bool, v2: bool, bits: int) -> Any:
    """vLLM's operator as its sources document it, with groups of 128; zero points [groups, n / 8], plain for v2."""
    assert (shuffled, v2, order.numel()) == (True, True, 0)
    kind = "int4" if bits == 4 else "int8"
    k = len(words) * 32 // bits
    per_word = 32 // bits
    unpacked = torch.stack([zeros >> bits * place & (1 << bits) - 1 for place in range(per_word)], dim=2).flatten(1)
    form = WeightFormat(kind, "group", 128, True)  # type: ignore[arg-type]
    given = QuantisedMatrix(form, k, words.shape[1], words, scales, unpacked)
    return (x.double() @ oracle.weights(given)).half()


@pytest.mark.parametrize("product", SMALL, ids=str)
def test_all_contenders_compute_the_same(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = SimpleNamespace(gptq_gemm=gptq_gemm, gptq_shuffle=lambda words, order, bits: None)
    monkeypatch.setattr(exllama, "operators", lambda: ops)
    rows = {row.contender: row for row in measure(product, contenders(), Clock(), 1, 0)}
    assert set(rows) == {OURS, "fp16, cuBLAS", "exllama (vLLM)"}
    for row in rows.values():
        if row.contender.startswith("exllama") and product.format.kind == "fp8_e4m3":
            assert row.note == "exllama has no FP8 weights."
            continue
        assert row.note == ""
        assert row.error is not None
        assert row.error < 3e-3
        assert row.ratio == (None if row.contender == OURS else 1.0)


def test_rates() -> None:
    few, many = (Product(WeightFormat("int4", "group", 128), "o", 256, 136, rows) for rows in (2, 100))
    (ours, dense) = measure(few, [Ours(), Dense()], Clock(), 1, 0)
    assert (ours.unit, dense.unit) == ("GB/s", "GB/s")
    assert ours.value == pytest.approx((256 * 136 / 2 + 4 * 2 * 136) / 1e9)
    assert dense.value == pytest.approx(2 * 256 * 136 / 1e9)
    (ours, _) = measure(many, [Ours(), Dense()], Clock(), 1, 0)
    assert ours.unit == "TFLOPS"
    assert ours.value == pytest.approx(2 * 100 * 256 * 136 / 1e12)


def test_few_rows_rotate_over_matrices() -> None:
    seen: list[int] = []

    class Counted(Dense):
        def bind(self, x: torch.Tensor, given: QuantisedMatrix) -> Call:
            seen.append(given.numbers.data_ptr())
            return super().bind(x, given)

    few = Product(FORMATS[0], "o", 256, 136, 2)
    measure(few, [Ours(), Counted()], Clock(), 1, Counted().weight_bytes(few))
    assert len(seen) == volta_linear.ROTATED


def test_failures_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Dense):
        name = "wrong"

        def bind(self, x: torch.Tensor, given: QuantisedMatrix) -> Call:
            right = super().bind(x, given)
            return lambda: right() * 1.1

    class Large(Dense):
        name = "large"

        def bind(self, x: torch.Tensor, given: QuantisedMatrix) -> Call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128 GiB")

    monkeypatch.setattr(exllama, "operators", lambda: "this vLLM has no gptq_gemm (AttributeError: x).")
    rows = {row.contender: row for row in measure(SMALL[0], [Ours(), Wrong(), Large(), Exllama()], Clock(), 1, 0)}
    assert rows["wrong"].note.startswith("wrong by ")
    assert (rows["wrong"].peer, rows["wrong"].ratio) == (None, None)
    assert rows["large"].note == "out of memory."
    assert rows["exllama (vLLM)"].note == "this vLLM has no gptq_gemm (AttributeError: x)."
    assert rows[OURS].value is not None


def test_the_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpus, "hardware", lambda: {"gpu": "Tesla V100-SXM2-16GB"})
    rows = measure(SMALL[0], [Ours(), Dense(), Exllama()], Clock(), 1, 0)
    volta_linear.print_report(Console(width=180), volta_linear.report(rows, "sm_70, machine code"))
    output = capsys.readouterr().out
    assert "Tesla V100-SXM2-16GB, ours: sm_70, machine code" in output
    assert "(1.00x)" in output


def test_all_layers_are_supported() -> None:
    assert len(volta_linear.products()) == 3 * 9 * 7
    assert all(Ours().why_not(product) is None for product in volta_linear.products())


def test_reports_of_hardware_are_of_attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from fastattention_vllm.bench import volta

    monkeypatch.setattr(volta, "why_not", lambda kernels: None)
    arguments = ["bench", "volta", "--weights", "--report", str(tmp_path / "report.json")]
    result = CliRunner().invoke(command.app, arguments)
    assert result.exit_code == 2
    assert result.output == "fastattention bench: --report checks attention; use --json with --weights.\n"


@pytest.mark.parametrize("wrong", [False, True])
def test_a_whole_run(wrong: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wrong answer of ours is the exit status."""
    monkeypatch.setattr(gpus, "CudaGpu", Clock)
    monkeypatch.setattr(gpus, "hardware", lambda: {"gpu": "Tesla V100-SXM2-16GB"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=6 << 20))
    monkeypatch.setattr(volta_linear, "products", lambda: SMALL[1::2])
    if wrong:
        monkeypatch.setattr(kernels, "apply", lambda x, weights: torch.zeros(len(x), weights.n).half())
    out = tmp_path / "rows.json"
    assert volta_linear.run(1, out, Console(width=180), "sm_70, machine code") == int(wrong)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 3 * 3
    assert {row["weights"] for row in rows} == {"int4", "int8", "fp8_e4m3"}
