"""`fastattention bench cpu` and `benchmarks/cpu_attention.py`."""

from __future__ import annotations

import dataclasses
import json as jsonlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from fastattention_vllm.attention import cpu as kernels
from fastattention_vllm.bench import table
from fastattention_vllm.bench.cases import DEFAULT_PAGE, Case, parse_case
from fastattention_vllm.bench.contenders import contenders
from fastattention_vllm.bench.report import Report, Row, report
from fastattention_vllm.bench.runner import Runner, measure_all
from fastattention_vllm.bench.suites import SUITES, cases_of

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench = typer.Typer(no_args_is_help=True, help="Measure this machine.")
app.add_typer(bench, name="bench")


@app.callback()
def fastattention() -> None:
    """FastAttention for vLLM."""


@bench.callback()
def benchmarks() -> None:
    """Side-by-side measurements; they want an otherwise idle machine."""


@bench.command()
def cpu(
    suite: Annotated[list[str] | None, typer.Option(help=f"Named lists of cases: {', '.join(SUITES)}.")] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="One case, as in 'decode bf16 (32,8,128) 32K b1' or 'prefill bf16 (32,8,128) 512 on 8K'."),
    ] = None,
    threads: Annotated[str, typer.Option(help="Thread counts, each in a process of its own: 1,2,4.")] = "",
    contender: Annotated[list[str] | None, typer.Option(help="Only these: ours, sdpa, vllm.")] = None,
    page: Annotated[int, typer.Option(min=1, help="Tokens per page, where the case does not say.")] = DEFAULT_PAGE,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved samples of each contender.")] = 9,
    json: Annotated[Path | None, typer.Option(help="Write the rows there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw plots into this folder.")] = None,
) -> None:
    """CPU attention next to other implementations and to what this machine can do at all.

    Without a suite or a case, the suite `quick` runs.
    """
    cases = chosen_cases(suite or ([] if case else ["quick"]), case or [], page)
    counts = chosen_threads(threads)
    contenders(contender)  # a wrong name ends here, not in a child
    console = Console(width=None if sys.stdout.isatty() else 180)
    found = measure_in_children(cases, counts, contender, rounds)
    table.print_report(console, found)
    if json is not None:
        json.write_text(found.model_dump_json(indent=1) + "\n")
    if plot is not None:
        from fastattention_vllm.bench.plots import draw

        for path in draw(found, plot):
            console.print(f"wrote {path}")


def chosen_cases(suites: list[str], spelled: list[str], page: int) -> list[Case]:
    try:
        named = [found for suite in suites for found in cases_of(suite, page)]
        return list(dict.fromkeys(named + [parse_case(text, page) for text in spelled]))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def chosen_threads(text: str) -> list[int]:
    """The counts in ``text``, or one thread per CPU that this process may use."""
    available = len(os.sched_getaffinity(0))
    try:
        counts = [int(part) for part in text.split(",")] if text else [available]
    except ValueError:
        raise typer.BadParameter(f"--threads is {text!r}; write numbers separated by commas, as in 1,2,4.") from None
    for count in counts:
        if not 1 <= count <= available:
            raise typer.BadParameter(f"--threads names {count}, but this process may use 1 to {available} CPUs.")
    return list(dict.fromkeys(counts))


def measure_here(cases: list[Case], threads: int, names: list[str] | None, rounds: int, console: Console) -> Report:
    kernels.set_num_threads(threads)
    torch.set_num_threads(threads)

    def progress(case: Case, rows: list[Row], seconds: float) -> None:
        table.print_rows(console, rows, seconds)

    rows = measure_all(Runner(contenders(names), threads, rounds), cases, progress)
    return report(rows, threads)


def measure_in_children(cases: list[Case], counts: list[int], names: list[str] | None, rounds: int) -> Report:
    """One process per thread count: OpenMP takes its number of threads when it starts and never gives them back."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            path = Path(folder) / f"{count}.json"
            order = {
                "cases": [dataclasses.asdict(case) for case in cases],
                "threads": count,
                "contenders": names,
                "rounds": rounds,
                "out": str(path),
            }
            command = [sys.executable, "-m", "fastattention_vllm.bench.child", jsonlib.dumps(order)]
            status = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": str(count)}).returncode
            if not path.exists():
                raise typer.Exit(status or 1)
            rows += Report.model_validate_json(path.read_text()).rows
    return report(rows, max(counts))
