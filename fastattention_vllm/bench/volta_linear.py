"""`fastattention bench volta --weights`: our products with quantised weights beside fp16 cuBLAS and exllama's.

Used by: command.py.

The matrices are those of a 27B model on one, two and four GPUs, as in benchmarks/volta_weights_sim.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.table import Table

from fastattention_vllm.bench import exllama
from fastattention_vllm.bench import gpu as gpus
from fastattention_vllm.bench.contender import Call
from fastattention_vllm.bench.gpu import Gpu, Timed
from fastattention_vllm.bench.hardware_report import SEND
from fastattention_vllm.bench.measured import Measured, noted, sample, together
from fastattention_vllm.bench.report import Report, today
from fastattention_vllm.linear.volta import kernels, launch, packing
from fastattention_vllm.linear.volta.reference import dequantised
from fastattention_vllm.linear.weights import MIDDLE, Kind, QuantisedMatrix, WeightFormat

OURS = "ours"
TOLERANCE = 1e-2
"""Largest difference to float64, as a share of the results' root mean square, of an answer that counts as right."""
ROTATED = 4
"""Calls go through so many times the L2 cache before they read a matrix again."""
ROWS = (1, 4, 8, 16, 64, 1024, 4096)
FORMATS = (
    WeightFormat("int4", "group", 128),
    WeightFormat("int8", "group", 128),
    WeightFormat("fp8_e4m3", "block"),
)
LAYERS = {
    f"{name} TP {ranks}": (k // ranks if split == "k" else k, n // ranks if split == "n" else n)
    for ranks in (1, 2, 4)
    for name, k, n, split in (("gate_up", 5120, 34816, "n"), ("down", 17408, 5120, "k"), ("o", 6144, 5120, "k"))
}
"""k and n of each rank's share."""
SAMPLED = 256
"""Columns of an answer that are compared with float64."""


class LinearRow(Measured):
    """``value``: ``GB/s`` of the contender's own weights and scales up to 16 rows, ``TFLOPS`` from there on."""

    weights: Kind
    layer: str
    k: int
    n: int
    rows: int


class LinearReport(Report[LinearRow]):
    hardware: dict[str, str]
    kernels: str
    """How ours run there."""


@dataclass(frozen=True)
class Product:
    format: WeightFormat
    layer: str
    k: int
    n: int
    rows: int

    def __str__(self) -> str:
        return f"{self.format.kind} {self.layer} ({self.k} x {self.n}) {self.rows} rows"

    @property
    def decodes(self) -> bool:
        return self.rows <= launch.MOST_ROWS

    @property
    def packed_bytes(self) -> int:
        groups, columns = self.format.scale_shape(self.k, self.n)
        return self.k * self.n // (2 if self.format.kind == "int4" else 1) + 4 * groups * columns


class LinearContender(Protocol):
    name: str

    def why_not(self, product: Product) -> str | None:
        """Why it cannot compute ``product``, in one sentence."""

    def weight_bytes(self, product: Product) -> int:
        """That it reads for each call."""

    def bind(self, x: torch.Tensor, given: QuantisedMatrix) -> Call:
        """``x @ given``, both on the GPU."""


class Ours:
    name = OURS

    def why_not(self, product: Product) -> str | None:
        return kernels.supports(product.format, product.k, product.n)

    def weight_bytes(self, product: Product) -> int:
        return product.packed_bytes

    def bind(self, x: torch.Tensor, given: QuantisedMatrix) -> Call:
        kernels.load(given.format)
        weights = packing.pack(given)
        return lambda: kernels.apply(x, weights)


class Dense:
    """What a model with fp16 weights does."""

    name = "fp16, cuBLAS"

    def why_not(self, product: Product) -> str | None:
        return None

    def weight_bytes(self, product: Product) -> int:
        return 2 * product.k * product.n

    def bind(self, x: torch.Tensor, given: QuantisedMatrix) -> Call:
        weight = dequantised(packing.pack(given)).half().t().contiguous()
        return lambda: torch.nn.functional.linear(x, weight)


class Exllama:
    name = "exllama (vLLM)"

    def why_not(self, product: Product) -> str | None:
        if product.format.kind not in MIDDLE:
            return "exllama has no FP8 weights."
        operators = exllama.operators()
        return operators if isinstance(operators, str) else None

    def weight_bytes(self, product: Product) -> int:
        groups, columns = product.format.scale_shape(product.k, product.n)
        return product.packed_bytes - groups * columns * (2 if product.format.kind == "int8" else 1)

    def bind(self, x: torch.Tensor, given: QuantisedMatrix) -> Call:
        return exllama.call(x, given)


def contenders() -> list[LinearContender]:
    return [Ours(), Dense(), Exllama()]


def products() -> list[Product]:
    return [Product(form, layer, k, n, rows) for form in FORMATS for layer, (k, n) in LAYERS.items() for rows in ROWS]


def matrix(product: Product, device: torch.device, seed: int) -> QuantisedMatrix:
    """Random numbers, and scales that make weights of about 0.02."""
    random = torch.Generator(device).manual_seed(seed)
    form, k, n = product.format, product.k, product.n
    shape = form.scale_shape(k, n)
    scales = torch.rand(shape, generator=random, device=device) + 0.5
    if form.kind == "fp8_e4m3":
        numbers = torch.randn(n, k, generator=random, device=device).to(torch.float8_e4m3fn).t()
        return QuantisedMatrix(form, k, n, numbers, scales * 0.02)
    words = torch.randint(-(1 << 31), 1 << 31, form.number_shape(k, n), generator=random, device=device)
    size = 0.004 if form.kind == "int4" else 0.00025
    return QuantisedMatrix(form, k, n, words.to(torch.int32), (scales * size).half())


def error_of(x: torch.Tensor, given: QuantisedMatrix, out: torch.Tensor) -> float:
    """Largest difference to float64 on some rows and columns, as a share of their root mean square."""
    rows = torch.linspace(0, len(x) - 1, min(32, len(x)), device=x.device).round().long()
    first = given.n // 2 // packing.TILE // 16 * packing.TILE * 16  # a whole block of FP8
    columns = slice(first, first + min(SAMPLED, given.n - first))
    weights = dequantised(packing.pack(given))[:, columns].double()
    right = x[rows].double() @ weights
    difference = (out[rows][:, columns].double() - right).abs().max() / right.square().mean().sqrt()
    found = float(difference)
    return found if found == found else float("inf")


def measure(
    product: Product, everyone: Sequence[LinearContender], gpu: Gpu, rounds: int, l2_bytes: int
) -> list[LinearRow]:
    """A row for each contender, in their order; the errors of those that fail are their rows' notes."""
    rows = {one.name: _empty(product, one.name) for one in everyone}
    timed: list[Timed] = []
    x = torch.randn(
        product.rows, product.k, generator=torch.Generator(gpu.device).manual_seed(0), device=gpu.device
    ).half()
    for one in everyone:
        row = rows[one.name]
        row.note = one.why_not(product) or ""
        if row.note:
            continue
        with noted(row, TOLERANCE, gpu):
            copies = max(1, -(-ROTATED * l2_bytes // one.weight_bytes(product))) if product.decodes else 1
            first = matrix(product, gpu.device, 0)
            calls = [one.bind(x, first if copy == 0 else matrix(product, gpu.device, copy)) for copy in range(copies)]
            row.error = error_of(x, first, calls[0]())
            # In vLLM, steps of few rows are graphs: the CPU's part must not count.
            whole, row.captured = together(calls, gpu, graph=product.decodes)
            gpu.seconds(whole)
            timed.append(Timed(one.name, whole, copies))
    bytes_of = {one.name: one.weight_bytes(product) for one in everyone}
    flops = 2 * product.rows * product.k * product.n
    sample(rows, timed, gpu, rounds, lambda name: bytes_of[name] / 1e9 if product.decodes else flops / 1e12, OURS)
    return list(rows.values())


def _empty(product: Product, name: str) -> LinearRow:
    return LinearRow(
        case=str(product),
        metric="decode weight read rate" if product.decodes else "prefill product rate",
        unit="GB/s" if product.decodes else "TFLOPS",
        ours=None,
        weights=product.format.kind,
        layer=product.layer,
        k=product.k,
        n=product.n,
        rows=product.rows,
        contender=name,
    )


def run(rounds: int, json: Path, console: Console, kernels_run: str) -> int:
    """Measure; ``json`` has the report so far after every product. Returns 1 if an answer of ours is wrong, else 0.

    ``kernels_run``: how the kernels run here, for the report.
    """
    gpu = gpus.CudaGpu()
    l2_bytes = int(torch.cuda.get_device_properties(gpu.device).L2_cache_size)
    rows: list[LinearRow] = []
    for product in products():
        found = measure(product, contenders(), gpu, rounds, l2_bytes)
        gpu.free()
        rows += found
        report(rows, kernels_run).write(json)
        ours = found[0]
        console.print(f"{product}: ours {ours.value} {ours.unit} {ours.note}", highlight=False)
    print_report(console, report(rows, kernels_run))
    console.print(f"wrote {json}. {SEND}", highlight=False)
    return int(any(row.contender == OURS and row.note.startswith("wrong") for row in rows))


def report(rows: list[LinearRow], kernels_run: str) -> LinearReport:
    return LinearReport(
        hardware=gpus.hardware(), kernels=kernels_run, versions=gpus.versions(), date=today(), rows=rows
    )


def print_report(console: Console, found: LinearReport) -> None:
    names = list(dict.fromkeys(row.contender for row in found.rows))
    table = Table("product", "unit", *names, title=f"{found.hardware['gpu']}, ours: {found.kernels}")
    for case in dict.fromkeys(row.case for row in found.rows):
        of_case = {row.contender: row for row in found.rows if row.case == case}
        table.add_row(case, next(iter(of_case.values())).unit, *(_cell(of_case[name]) for name in names))
    console.print(table)
    for note in dict.fromkeys(f"{row.contender}: {row.note}" for row in found.rows if row.note):
        console.print(f"  {note}", style="yellow", highlight=False, markup=False)


def _cell(row: LinearRow) -> str:
    if row.value is None:
        return "-"
    ratio = "" if row.ratio is None else f" ({row.ratio:.2f}x)"
    return f"{row.value:.4g}{ratio}" + (" wrong" if row.note else "")
