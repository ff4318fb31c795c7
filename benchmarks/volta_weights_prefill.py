"""Many rows times quantised weights on a V100: launches in turns against unpacked weights and cuBLAS, counted.

    python benchmarks/volta_weights_prefill.py --json FILE

Run by: contributors who change kernels/volta/src/unpack.cu or the launcher's choice.
Needs: `make setup-dev`, and the results of benchmarks/volta_weights_sim.py. No GPU.

A turn of 16 rows is simulated (volta_weights_sim.py, x from L2). Unpacking is counted: packed weights are read and fp16
weights are written at 817 GB/s. The simulated kernel moves no further bytes, and keeps memory busy (`unpacked`). cuBLAS
is assumed: 90 TFLOPS, and 85 and 95 beside it, but never faster than its weights are read. The times of launches are
not included.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy
from rich.console import Console
from rich.table import Table
from volta_sim_report import FEED
from volta_weights_sim import FED, GROUP, LAYERS, weight_bytes

from fastattention_vllm.bench.report import Row, compared, report
from fastattention_vllm.linear.volta import launch
from kernels.volta import linear_problems as linear
from kernels.volta.linear_variants import TILE, UNPACK
from kernels.volta.sim import default_timing

SIMULATED = Path(__file__).parent / "results" / "2026-11-25-volta-simulated-weights.json"
KINDS = {"int4": "int4", "int8": "int8", "e4m3": "fp8_e4m3"}
"""Names in the simulated rows, and in the launcher."""
ROWS = (16, 32, 64, 112, 128, 256, 512, 1024, 2048, 4096)
ASSUMED = 90.0
"""TFLOPS of cuBLAS."""
OTHERS = (85.0, 95.0)
TITLE = "V100, counted: turns simulated, unpacking at 817 GB/s, cuBLAS assumed"


@dataclass(frozen=True)
class Times:
    """Seconds."""

    turns: float
    unpacked: float
    dense: float
    """Of a model with fp16 weights."""
    chosen: float
    """Of the way that the launcher takes."""


def unpacked(weight: str, k: int, n: int) -> tuple[float, float]:
    """Bytes that an SM of the simulated V100 moves to unpack a matrix, and what memory could move in that time."""
    given = linear.problem(weight, 1, k, n, group=GROUP, blocks=True)
    variant = next(one for one in UNPACK if one.weight == weight)
    machine = linear.simulated(variant)
    weights = linear.weights_on(machine, given)
    out = numpy.zeros((n, k), numpy.float16)
    grid = (n // TILE, -(-weights.units // variant.warps), 1)
    parameters = linear.Unpack(weights=weights, out=machine.map(out), first_tile=0)
    machine.launch(grid, (variant.threads, 1, 1), bytes(parameters))
    traces = [machine.trace(x, y) for x in range(grid[0]) for y in range(grid[1])]
    timing = default_timing(**FED, l1_kib=machine.l1_kib(machine.occupancy.ctas))
    found = machine.time(traces, timing=timing)
    return found.l2_bytes, FED["l2_bytes_per_cycle"] * found.cycles


def turn_seconds() -> dict[str, float]:
    """Of 16 rows, by the begin of the case's name."""
    rows = json.loads(SIMULATED.read_text())["rows"]
    found = {row["case"].split(" (")[0]: row for row in rows if row["case"].endswith(" 16 rows")}
    return {name: 1e-6 * row["microseconds"] for name, row in found.items()}


def times(weight: str, k: int, n: int, rows: int, turn: float, tflops: float) -> Times:
    read = 2 * (k * n + rows * (k + n)) / (1e9 * FEED)
    dense = max(2 * rows * k * n / (1e12 * tflops), read)
    unpacked = dense + (weight_bytes(weight, k, n) + 2 * k * n) / (1e9 * FEED)
    turns = turn * -(-rows // launch.MOST_ROWS)
    return Times(turns, unpacked, dense, turns if launch.reads_packed(KINDS[weight], rows) else unpacked)


def row(weight: str, layer: str, rows: int, turn: float) -> Row:
    k, n = LAYERS[layer]
    found = times(weight, k, n, rows, turn, ASSUMED)
    tera = 2 * rows * k * n / 1e12
    fractions = {}
    for rate in OTHERS:
        other = times(weight, k, n, rows, turn, rate)
        fractions[f"fraction_of_dense_at_{rate:.0f}"] = other.dense / other.chosen
    return compared(
        f"{weight} {layer} ({k} x {n}) {rows} rows",
        "prefill product rate",
        "TFLOPS",
        tera / found.chosen,
        better="higher",
        limit=tera / found.dense,
        turns_us=1e6 * found.turns,
        unpacked_us=1e6 * found.unpacked,
        dense_us=1e6 * found.dense,
        chosen="turns" if found.chosen == found.turns else "unpacked",
        **fractions,
    )


def counted() -> list[Row]:
    turns = turn_seconds()
    return [
        row(weight, layer, rows, turns[f"{weight} {layer}"]) for weight in KINDS for layer in LAYERS for rows in ROWS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    found = counted()
    table = Table("case", "turns, us", "unpacked, us", "fp16, us", "chosen", "of fp16", "at 85", "at 95", title=TITLE)
    for one in found:
        values = one.model_dump()
        table.add_row(
            one.case,
            *(f"{values[name]:.0f}" for name in ("turns_us", "unpacked_us", "dense_us")),
            values["chosen"],
            f"{one.fraction_of_limit:.1%}",
            *(f"{values[f'fraction_of_dense_at_{rate:.0f}']:.1%}" for rate in OTHERS),
        )
    console.print(table)
    if options.json is not None:
        report(found, TITLE, {"turns": SIMULATED.name}).write(options.json)


if __name__ == "__main__":
    main()
