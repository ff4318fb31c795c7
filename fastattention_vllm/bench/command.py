"""The commands `fastattention bench cpu` and `fastattention bench volta`.

Run by: users, as `fastattention bench` or benchmarks/cpu_attention.py.
Needs: this package with its extra `bench`; for `volta` an NVIDIA GPU and what `make volta` builds.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from pydantic import BaseModel
from rich.console import Console

from fastattention_vllm.attention.cpu import kernels
from fastattention_vllm.bench import table
from fastattention_vllm.bench.cases import DEFAULT_PAGE, Case, parse_case
from fastattention_vllm.bench.contenders import OURS, contenders
from fastattention_vllm.bench.cpu_report import CpuReport, CpuRow, cpu_report
from fastattention_vllm.bench.runner import Runner
from fastattention_vllm.bench.suites import SUITES, cases_of

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure attention kernels on this machine.")
app.add_typer(bench, name="bench")


@app.callback()
def fastattention() -> None:
    """FastAttention for vLLM."""


@bench.callback()
def benchmarks() -> None:
    """Measure attention kernels side by side. The machine should be idle otherwise."""


@bench.command()
def cpu(
    suite: Annotated[list[str] | None, typer.Option(help=f"Named lists of cases: {', '.join(SUITES)}.")] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="One case, as in 'decode bf16 (32,8,128) 32K b1' or 'prefill bf16 (32,8,128) 512 on 8K'."),
    ] = None,
    threads: Annotated[str, typer.Option(help="Thread counts, as in 1,2,4. Each runs in a separate process.")] = "",
    contender: Annotated[
        list[str] | None, typer.Option(help="Measure only this one: ours, sdpa or vllm. May be repeated.")
    ] = None,
    page: Annotated[int, typer.Option(min=1, help="Tokens per page, if the case does not name it.")] = DEFAULT_PAGE,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved samples of each contender.")] = 9,
    sweep_gib: Annotated[
        float | None,
        typer.Option(min=0.001, help="Decoding rotates over this many GiB, instead of 4 GiB or 8 times the L3 cache."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the rows there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw plots into this folder.")] = None,
) -> None:
    """Measure CPU attention beside other implementations.

    Each row also compares our kernel with the limit of this machine.

    Without a suite or a case, the suite `quick` runs.
    """
    try:
        cases = chosen_cases(suite or ([] if case else ["quick"]), case or [], page)
        counts = chosen_threads(threads)
        contenders(contender)
        kernels.isa()
        if plot is not None:
            if importlib.util.find_spec("matplotlib") is None:
                raise ValueError("--plot needs matplotlib: pip install 'fastattention-vllm[bench]'")
            plot.mkdir(parents=True, exist_ok=True)
        if json is not None:
            json.open("a").close()  # which a folder refuses, too
    except (ValueError, RuntimeError, OSError) as error:  # now, and not after half an hour of measuring
        reason = f"{error.filename}: {error.strerror}." if isinstance(error, OSError) else error
        typer.echo(f"fastattention bench: {reason}", err=True)
        raise typer.Exit(2) from None
    found, status = measure_in_children(cases, counts, contender, rounds, sweep_gib)
    console = new_console()
    if found.rows:
        table.print_report(console, found)
    if json is not None:
        found.write(json)
    if plot is not None:
        from fastattention_vllm.bench.plots import draw

        for path in draw(found, plot):
            console.print(f"wrote {path}")
    asked = "ours" if contender is None or OURS in contender else "peer"
    if all(getattr(row, asked) is None for row in found.rows):
        status = status or 1  # the rows say why
    raise typer.Exit(status)


@bench.command()
def volta(
    tokens: Annotated[str, typer.Option(help="Prompt lengths for prefill.")] = "1024,2048,4096,8192,16384",
    context: Annotated[str, typer.Option(help="Context lengths for decoding one token.")] = "4096,16384",
    batch: Annotated[int, typer.Option(min=1, max=1024, help="Requests.")] = 8,
    heads: Annotated[int, typer.Option(min=1, max=256, help="Query heads.")] = 32,
    head_size: Annotated[int, typer.Option(help="Elements per head.")] = 64,
    contender: Annotated[
        list[str] | None,
        typer.Option(help="Measure only ours and peers whose names begin so: 'torch SDPA', xformers, eager."),
    ] = None,
    kernels: Annotated[
        str, typer.Option(help="auto: this GPU's. On newer GPUs, ptx: the V100's; ptx-sm_75: Turing's.")
    ] = "auto",
    weights: Annotated[
        bool, typer.Option("--weights", help="Measure products with quantised weights instead of attention.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved samples of each contender.")] = 9,
    json: Annotated[Path, typer.Option(help="Write the rows there.")] = Path("fastattention-bench-volta.json"),
    report: Annotated[
        Path | None,
        typer.Option(help="First check the numbers of every kind of step. Write a hardware report there, not --json."),
    ] = None,
) -> None:
    """Measure the V100, T4 and RTX 20 kernels on this GPU.

    The peers are torch SDPA, xformers and Hugging Face's eager attention.

    Without options, it measures the cases of Figure 8 of the FastAttention paper, and decoding. With --report, the
    file is a hardware report: please attach that of a V100, a T4 or an RTX 20 to an issue.

    With --weights, the cases are the matrices of a 27B model in int4, int8 and FP8, and the peers are fp16 weights
    (cuBLAS) and exllama's GPTQ kernel of vLLM.
    """
    from fastattention_vllm.bench import volta as measuring
    from fastattention_vllm.bench import volta_linear, volta_numbers
    from fastattention_vllm.bench.volta_contenders import contenders as of_volta

    try:
        everyone = of_volta(contender)
        everything = measuring.cases(
            lengths("--tokens", tokens), lengths("--context", context), batch=batch, heads=heads, head_size=head_size
        )
        reason = measuring.why_not(kernels)
        if reason is not None:
            raise ValueError(reason)
        if weights and report is not None:
            raise ValueError("--report checks attention; use --json with --weights.")
        written = report or json
        written.open("a").close()
    except (ValueError, OSError) as error:
        reason = f"{error.filename}: {error.strerror}." if isinstance(error, OSError) else str(error)
        typer.echo(f"fastattention bench: {reason}", err=True)
        raise typer.Exit(2) from None
    if weights:
        raise typer.Exit(volta_linear.run(rounds, written, new_console(), measuring.kernels_here()))
    checks = None
    if report is not None:
        device = torch.device("cuda", torch.cuda.current_device())
        checks = [volta_numbers.check(step, device) for step in volta_numbers.steps()]
        for one in checks:
            if not one.right:
                typer.echo(f"WRONG {one.case}: {one.note or one.error}")
        typer.echo(f"{sum(one.right for one in checks)} of {len(checks)} kinds of step are right")
    raise typer.Exit(measuring.run(everything, everyone, rounds, written, new_console(), checks))


def lengths(option: str, text: str) -> list[int]:
    """Numbers separated by commas, none at all for an empty text; ``ValueError`` with one sentence."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} is {text!r}; write numbers separated by commas, as in 1024,4096.")
    return list(dict.fromkeys(int(part) for part in parts))


def new_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 180)


def chosen_cases(suites: list[str], spelled: list[str], page: int) -> list[Case]:
    """Each case once; ``ValueError`` with one sentence for what cannot be understood."""
    named = [found for suite in suites for found in cases_of(suite, page)]
    return list(dict.fromkeys(named + [parse_case(text, page) for text in spelled]))


def chosen_threads(text: str) -> list[int]:
    """The counts in ``text``, or one thread per CPU that this process may use; ``ValueError`` with one sentence."""
    available = len(os.sched_getaffinity(0))
    parts = text.split(",") if text else [str(available)]
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--threads is {text!r}; write numbers separated by commas, as in 1,2,4.")
    counts = [int(part) for part in parts]
    for count in counts:
        if not 1 <= count <= available:
            raise ValueError(f"--threads names {count}, but this process may use 1 to {available} CPUs.")
    return list(dict.fromkeys(counts))


class Order(BaseModel):
    """What a measuring process is told."""

    cases: list[Case]
    threads: int
    contenders: list[str] | None
    rounds: int
    sweep_bytes: int | None
    out: Path


def measure_in_children(
    cases: list[Case], counts: list[int], names: list[str] | None, rounds: int, sweep_gib: float | None
) -> tuple[CpuReport, int]:
    """What was measured, and the exit status: rows of a run that breaks off are kept.

    One process per thread count: OpenMP takes its number of threads when it starts.
    """
    sweep_bytes = None if sweep_gib is None else int(sweep_gib * 2**30)
    rows: list[CpuRow] = []
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        for threads in counts:
            out = Path(folder) / f"{threads}.json"
            order = Order(
                cases=cases, threads=threads, contenders=names, rounds=rounds, sweep_bytes=sweep_bytes, out=out
            )
            command = [sys.executable, "-m", "fastattention_vllm.bench.worker", order.model_dump_json()]
            try:
                status = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}).returncode
            except KeyboardInterrupt:
                status = 130
            if out.exists():
                rows += CpuReport.model_validate_json(out.read_text()).rows
            if status:
                break
    return cpu_report(rows, max(counts)), status


def measure_here(order: Order, console: Console) -> None:
    """Measure in this process; the report so far is in ``order.out`` after every case."""
    kernels.set_num_threads(order.threads)
    torch.set_num_threads(order.threads)
    runner = Runner(contenders(order.contenders), order.threads, order.rounds, order.sweep_bytes)
    rows: list[CpuRow] = []
    for case in order.cases:
        start = time.perf_counter()
        found = runner.measure(case)
        table.print_rows(console, found, time.perf_counter() - start)
        rows += found
        order.out.write_text(cpu_report(rows, order.threads).model_dump_json())
