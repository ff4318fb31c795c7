"""`fastattention bench volta`: our V100 kernels beside torch's, xformers' and Hugging Face's attention on a real GPU.

Used by: command.py and benchmarks/volta_launch_cost.py.

The set-up is that of Figure 8 of FastAttention (arXiv 2410.16663): batch 8, 32 heads of 64, 1K to 16K tokens, causal
and not. GPUs newer than Turing run our kernels through PTX: the V100's, whose m8n8k4 products are emulated there, or
Turing's, whose m16n8k8 they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from fastattention_vllm.attention.volta import kernels as volta
from fastattention_vllm.attention.volta import launch as volta_kernels
from fastattention_vllm.bench import gpu as gpus
from fastattention_vllm.bench.cases import Case
from fastattention_vllm.bench.contender import Bound
from fastattention_vllm.bench.correctness import attention
from fastattention_vllm.bench.gpu import Gpu, Timed
from fastattention_vllm.bench.hardware_report import SEND, Check, hardware_report
from fastattention_vllm.bench.measured import Measured, noted, sample, together
from fastattention_vllm.bench.report import Report, geometric_mean, today
from fastattention_vllm.bench.volta_contenders import OURS, Layer, VoltaContender

TOLERANCE = 1e-2
"""Largest difference to float64, of numbers of unit variance, of an answer that counts as right."""
MIN_ROTATED = 4
"""Decoding goes through so many times the L2 cache before it reads anything again."""


class VoltaRow(Measured):
    """``value``: ``TFLOPS`` of prefill, ``GB/s`` of keys and values of decoding."""

    kind: str
    batch: int
    heads: int
    kv_heads: int
    head_size: int
    context: int
    causal: bool
    ours_is: float | None = None
    """The same as ``ratio``."""


class VoltaReport(Report[VoltaRow]):
    hardware: dict[str, str]
    kernels: str
    """How ours run there."""


def cases(tokens: Sequence[int], contexts: Sequence[int], *, batch: int, heads: int, head_size: int) -> list[Case]:
    """Prefill of ``tokens``, causal and not; decoding at ``contexts`` with 1, 4 and 8 query heads per KV head."""
    if head_size not in volta_kernels.HEAD_SIZES:
        known = ", ".join(map(str, volta_kernels.HEAD_SIZES))
        raise ValueError(f"the head size is {head_size}, the Volta kernels take {known}.")
    for count in (*tokens, *contexts):
        if not 16 <= count <= 1 << 20:
            raise ValueError(f"a length is {count}; lengths lie between 16 and {1 << 20}.")
    found = [
        Case("prefill", "fp16", "fp16", heads, heads, head_size, count, count, batch, causal=causal)
        for count in tokens
        for causal in (False, True)
    ]
    groups = [group for group in (1, 4, 8) if heads % group == 0]
    found += [
        Case("decode", "fp16", "fp16", heads, heads // group, head_size, count, batch=batch)
        for count in contexts
        for group in groups
    ]
    return found


def how_kernels_run(target: volta.Target, capability: tuple[int, int]) -> str:
    emulated = target.architecture == volta_kernels.VOLTA and capability >= (7, 5)
    return f"{target}, m8n8k4 emulated" if emulated else str(target)


def why_not(kernels: str = "auto") -> str | None:
    """Why nothing can be measured here, in one sentence; chooses ``kernels`` (``volta_kernels``'s values) otherwise."""
    known = ("auto", *volta.CHOICES)
    if kernels not in known:
        return f"--kernels is {kernels!r}; there are {', '.join(known)}."
    reason = gpus.why_not()
    if reason is not None:
        return reason
    try:
        gpus.wake()
        volta.choose(kernels)
        volta.load(64, adjusted=False)
    except (RuntimeError, ValueError) as error:  # not built, refused by the driver, or not for this GPU
        return str(error).splitlines()[0]
    return None


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(case: Case, everyone: Sequence[VoltaContender], gpu: Gpu, rounds: int, l2_bytes: int) -> list[VoltaRow]:
    """A row for each contender, in their order; the errors of those that fail are their rows' notes."""
    rows = {one.name: _empty(case, one.name) for one in everyone}
    timed: list[Timed] = []
    bound: Bound | None
    try:
        query, layers = _tensors(case, gpu.device, l2_bytes)
    except torch.OutOfMemoryError:
        for row in rows.values():
            row.note = "out of memory before anything was computed."
        gpu.free()
        return list(rows.values())
    for one in everyone:
        row = rows[one.name]
        row.note = one.why_not(case) or ""
        if row.note:
            continue
        with noted(row, TOLERANCE, gpu):
            bound = one.bind(case, query, layers)
            row.error = error_of(case, query, layers[0], bound.answer())
            # Decoding is a graph in vLLM: the CPU's part must not count.
            whole, row.captured = together(bound.calls, gpu, graph=case.kind == "decode")
            gpu.seconds(whole)
            timed.append(Timed(one.name, whole, len(bound.calls)))
        bound = None  # its tensors go before the next contender's come
        gpu.free()
    work = case.flops / 1e12 if case.kind == "prefill" else case.kv_bytes / 1e9
    sample(rows, timed, gpu, rounds, lambda name: work, OURS)
    for row in rows.values():
        row.ours_is = row.ratio
    return list(rows.values())


def _empty(case: Case, name: str) -> VoltaRow:
    return VoltaRow(
        case=str(case),
        metric="prefill rate" if case.kind == "prefill" else "decode KV read rate",
        unit="TFLOPS" if case.kind == "prefill" else "GB/s",
        ours=None,
        kind=case.kind,
        batch=case.batch,
        heads=case.num_heads,
        kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        context=case.kv_len,
        causal=case.causal,
        contender=name,
    )


def _tensors(case: Case, device: torch.device, l2_bytes: int) -> tuple[torch.Tensor, list[Layer]]:
    """The query and layers, of unit variance. Decoding gets as many layers as it takes to leave the L2 cache behind."""
    count = 1 if case.kind == "prefill" else max(1, -(-MIN_ROTATED * l2_bytes // case.kv_bytes))
    generator = torch.Generator(device=device).manual_seed(0)

    def numbers(tokens: int, heads: int) -> torch.Tensor:
        shape = (case.batch, tokens, heads, case.head_size)
        return torch.randn(shape, dtype=torch.float16, device=device, generator=generator)

    query = numbers(case.q_len, case.num_heads).flatten(0, 1)
    return query, [
        Layer(numbers(case.kv_len, case.num_kv_heads), numbers(case.kv_len, case.num_kv_heads)) for _ in range(count)
    ]


def error_of(case: Case, query: torch.Tensor, layer: Layer, out: torch.Tensor) -> float:
    """Largest difference to float64 on up to 32 query rows of two heads of two sequences; infinity for NaN.

    ``query`` and ``out``: ``[batch * q_len, heads, head_size]``.
    """
    device = out.device
    rows = torch.linspace(0, case.q_len - 1, min(32, case.q_len), device=device).round().long()
    last = rows + case.kv_len - case.q_len if case.causal else torch.full_like(rows, case.kv_len - 1)
    worst = 0.0
    for sequence in {0, case.batch - 1}:
        for head in {0, case.num_heads - 1}:
            key, value = (t[sequence, :, head // case.group].double() for t in (layer.key, layer.value))
            own = rows + sequence * case.q_len
            right = attention(query[own, head, None].double(), key, value, last)[:, 0]
            difference = (out[own, head].double() - right).abs().max().item()
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst


# --- reports ---------------------------------------------------------------------------------------------------------


def kernels_here() -> str:
    """How the chosen kernels run on torch's GPU."""
    return how_kernels_run(volta.target(), torch.cuda.get_device_capability())


def report(rows: list[VoltaRow]) -> VoltaReport:
    return VoltaReport(
        hardware=gpus.hardware(),
        kernels=kernels_here(),
        versions=gpus.versions(),
        date=today(),
        rows=rows,
    )


def run(
    everything: Sequence[Case],
    everyone: Sequence[VoltaContender],
    rounds: int,
    json: Path,
    console: Console,
    checks: Sequence[Check] | None = None,
) -> int:
    """Measure; ``json`` has the report so far after every case. Returns 1 if an answer of ours is wrong, else 0.

    ``checks``: what was checked before. The file is then a hardware report.
    """
    gpu = gpus.CudaGpu()
    l2_bytes = int(torch.cuda.get_device_properties(gpu.device).L2_cache_size)
    rows: list[VoltaRow] = []
    for case in everything:
        found = measure(case, everyone, gpu, rounds, l2_bytes)
        gpu.free()
        rows += found
        write(report(rows), json, checks)
        ours = next(row for row in found if row.contender == OURS)
        console.print(f"{case}: ours {_number(ours.value)} {ours.unit} {ours.note}", highlight=False)
    print_report(console, report(rows))
    console.print(f"wrote {json}. {SEND}", highlight=False)
    wrong = any(not one.right for one in checks or ())
    return int(wrong or any(row.contender.startswith(OURS) and row.note.startswith("wrong") for row in rows))


def write(found: VoltaReport, path: Path, checks: Sequence[Check] | None) -> None:
    if checks is None:
        found.write(path)
        return
    hardware = {str(name): str(value) for name, value in dict(found.hardware).items()} | {"kernels": found.kernels}
    hardware_report(hardware["gpu"], hardware, found.versions, checks, found.rows).write(path)


def print_report(console: Console, found: VoltaReport) -> None:
    title = f"{found.hardware['gpu']}, ours: {found.kernels}"
    console.print(", ".join(f"{name} {value}" for name, value in found.hardware.items()), highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in found.versions.items()), highlight=False)
    for kind, unit in (("prefill", "TFLOPS"), ("decode", "GB/s of keys and values")):
        members = [row for row in found.rows if row.kind == kind]
        if not members:
            continue
        names = list(dict.fromkeys(row.contender for row in members))
        table = Table("case", *names, title=f"{kind}, {unit}. {title}")
        for case in dict.fromkeys(row.case for row in members):
            of_case = {row.contender: row for row in members if row.case == case}
            table.add_row(case, *(_cell(of_case[name]) if name in of_case else "" for name in names))
        console.print(table)
        for name in names:
            ratios = [row.ours_is for row in members if row.contender == name and row.ours_is is not None]
            mean = geometric_mean(ratios)
            if mean is not None:
                lost = sum(ratio < 1 for ratio in ratios)
                console.print(f"  ours against {name}: {mean:.2f}x, geometric mean of {len(ratios)} cases, {lost} lost")
    for note in dict.fromkeys(f"{row.contender}: {row.note}" for row in found.rows if row.note):
        console.print(f"  {note}", style="yellow", highlight=False, markup=False)


def _cell(row: VoltaRow) -> str:
    if row.value is None:
        return "out of memory" if row.note.startswith("out of memory") else "-"
    ratio = "" if row.ours_is is None else f" ({row.ours_is:.2f}x)"
    return f"{_number(row.value)}{ratio}" + ("" if row.error is None or row.error <= TOLERANCE else " wrong")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
