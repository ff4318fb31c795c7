"""`fastattention doctor`. It needs nothing but the package's own dependencies."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fastattention_vllm.doctor import report
from fastattention_vllm.doctor.findings import Finding
from fastattention_vllm.doctor.tensor_parallel import LLAMA_8B, Order, examine, kinds_of

DESCRIPTION = """\
Say what this machine, its drivers and its Python packages can run, and what to do about problems. It takes a few
seconds, and meanwhile reads memory and copies to the GPUs at full speed.
"""
EXIT_CODES = """\
Exit code: 0 without problems (with or without warnings), 1 with a problem or an incomplete --tp measurement, 2 for
wrong arguments.
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="fastattention doctor", description=DESCRIPTION, epilog=EXIT_CODES)
    made.add_argument("--json", action="store_true", help="print findings and facts as JSON")
    tiling = made.add_argument_group(
        'tensor parallelism: what tiling_all_reduce "auto" would do for a model\'s row-parallel layers here'
    )
    tiling.add_argument(
        "--tp", type=int, metavar="N", help="measure this with N ranks (at least 2), in place of the report"
    )
    tiling.add_argument(
        "--model", type=Path, help="folder with the model's config.json; default: the layers of an 8B Llama"
    )
    tiling.add_argument(
        "--tokens", type=int, default=8192, help="--max-num-batched-tokens of the server; default: %(default)s"
    )
    tiling.add_argument(
        "--min-tokens", type=int, default=2048, help="tiling_min_tokens of the server; default: %(default)s"
    )
    tiling.add_argument("--limit", type=float, default=300.0, help="stop after this many seconds; default: %(default)g")
    return made


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    made = parser()
    asked = made.parse_args(arguments)
    if asked.tp is not None:
        for name, value, minimum in (
            ("tp", asked.tp, 2),
            ("tokens", asked.tokens, 256),
            ("min-tokens", asked.min_tokens, 2),
            ("limit", asked.limit, 1),
        ):
            if value < minimum:
                made.error(f"--{name} is {value:g}; it must be at least {minimum}")
        if asked.json:
            made.error("--json cannot be combined with --tp")
        return tensor_parallel(asked)
    facts = report.probe() if asked.json else report.probe(print_area)
    found = report.findings(facts)
    print(report.as_json(facts, found) if asked.json else report.verdict(found))
    return 1 if report.counts(found)["problem"] else 0


def print_area(area: str, found: list[Finding]) -> None:
    """At once, because measuring the next area may take minutes on a busy machine."""
    for line in report.area_as_text(area, found):
        print(line, flush=True)


def tensor_parallel(asked: argparse.Namespace) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kinds = kinds_of(asked.model) if asked.model else LLAMA_8B
        order = Order(kinds, asked.tp, device, min(asked.min_tokens, asked.tokens), asked.tokens)
        complete = examine(order, asked.limit, lambda line: print(line, flush=True))
    except ValueError as error:
        print(f"fastattention doctor: {error}", file=sys.stderr)
        return 2
    if not complete:
        reason = f"a rank failed (its message is above), or the measurement took longer than --limit {asked.limit:g} s."
        print(f"fastattention doctor: {reason}", file=sys.stderr)
        return 1
    return 0
