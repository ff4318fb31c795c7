"""The paper's four strategies, each switched off alone and with others: the cost, measured or simulated.

    python benchmarks/ablation.py --json FILE             # CPU, simulated V100, and recorded H200 results
    python benchmarks/ablation.py --where cpu             # one of cpu, v100, h200
    python benchmarks/ablation.py --from FILE             # the table of a saved run

Run by: contributors who change one of these strategies, for benchmarks/notes/ablation.md.
Needs: `make setup-dev`. CPU: a compiler, an otherwise idle machine. V100 and H200: no GPU.

Two-level tiling and mask skipping are part of the kernels, so the kernels are built without them (cpu_variants.py; for
the V100, edits of the source as in volta_launches.py). The results of each build are compared with those of the shipped
build or with float64:

one panel       blocks of query rows are as small as those of the second level; each reads keys and values itself one
tile        the context is one tile: the working set of a panel of rows is as long as that and fits no cache (CPU) no
skipping     every row is multiplied with every key, and each score is compared with the mask

Tiling-AllReduce and host layers are switched off by their options.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ablation_cpu import cpu_rows
from ablation_h200 import stored_rows
from ablation_v100 import v100_rows
from rich.console import Console
from rich.table import Table

from fastattention_vllm.bench import machine
from fastattention_vllm.bench.report import Report, Row, report
from fastattention_vllm.bench.saved_report import saved_report

RESULTS = Path(__file__).with_name("results")
PLACES = ("cpu", "v100", "h200")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--cpu-tokens", type=int, default=8192)
    parser.add_argument("--cpu-heads", type=int, nargs=2, default=[4, 1], help="query heads and KV heads")
    parser.add_argument("--v100-tokens", type=int, default=4096)
    parser.add_argument("--v100-head-sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--from", type=saved_report, dest="saved", help="print the table of this file, and end")
    options = parser.parse_args()
    if options.saved:
        try:
            show(Report[Row].model_validate_json(options.saved.read_text()).rows)
        except (ValueError, AttributeError, TypeError):
            sys.exit(f"ablation: {options.saved} was not written by this script's --json.")
        return 0
    rows: list[Row] = []
    for place in options.where:
        rows += {"cpu": cpu_rows, "v100": v100_rows, "h200": lambda _: stored_rows(RESULTS)}[place](options)
        if options.json:
            hardware = f"{machine.hardware(1)}; simulated V100; H200 as the rows' files say"
            report(rows, hardware).write(options.json)
    show(rows)
    return 0


def show(rows: Sequence[Row]) -> None:
    table = Table("strategy", "where and what", "unit", "off", "on", "gain", "", title="What each strategy is worth")
    for one in rows:
        kind = one.kind + (f", {one.source}" if hasattr(one, "source") else "")
        numbers = [f"{value:.4g}" for value in (one.peer, one.ours)]
        table.add_row(one.strategy, one.case, one.unit, *numbers, f"{one.ratio:.2f}x", kind)
    Console(width=200).print(table)


if __name__ == "__main__":
    sys.exit(main())
