"""Products with 4- and 8-bit weights on the simulated V100: GB/s of weights read, for the layers of a 27B model.

    python benchmarks/volta_weights_sim.py --json FILE
    python benchmarks/volta_weights_sim.py --weights int4 --rows 1 16 --layers "gate_up TP 4"

Run by: contributors who change kernels/volta/src/linear.cu.
Needs: `make setup-dev`, and about ten minutes of one core for all rows. No GPU.

Every time is simulated: the CTAs of the busiest SM, out of DRAM at 817 GB/s for all SMs, with a latency of 450 cycles.
The limit is the time in which DRAM delivers weights and scales once. L2 holds x, because x is small and all SMs read
it. The simulated memory has one rate for L2 and DRAM, so there are two figures. "x from L2" raises that rate by the
share that x adds to the bytes. "all from DRAM" does not, and is pessimistic. The launch itself is not simulated.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table
from volta_sim_report import FEED, TITLE, versions
from volta_sim_rows import feed_timing

from fastattention_vllm.bench.report import Row, compared, report
from fastattention_vllm.linear.volta import launch as launcher
from kernels.volta import linear_problems as linear
from kernels.volta.linear_variants import TILE, VARIANTS, WEIGHTS, LinearVariant, describe
from kernels.volta.sim import V100, Simulation, default_timing

GROUP = 128
"""k of a group of scales; of e4m3, also the columns of its blocks."""
ROWS = (1, 4, 8, 16)
LAYERS = {
    f"{name} TP {ranks}": (k // ranks if split == "k" else k, columns // ranks if split == "columns" else columns)
    for ranks in (1, 2, 4)
    for name, k, columns, split in (
        ("gate_up", 5120, 34816, "columns"),
        ("down", 17408, 5120, "k"),
        ("o", 6144, 5120, "k"),
    )
}
"""k and columns of each rank's share."""


@dataclass(frozen=True)
class Time:
    seconds: float
    pessimistic: float
    """Everything out of DRAM."""
    error: float
    simulation: Simulation
    ctas: int
    warps: int


def simulated(weight: str, rows: int, k: int, columns: int, variant: LinearVariant) -> Time:
    """One launch. Only the CTAs of SM 0 are computed, on a smaller matrix that has their columns alone."""
    ctas, warps = launcher.shape(columns, -(-k // variant.unit), launched(variant))
    tiles, more = divmod(columns // TILE, ctas)
    mine = [tiles + (cta < more) for cta in range(0, ctas, V100.sms)]  # the longer ones come first
    given = linear.problem(weight, rows, k, sum(mine) * TILE, group=GROUP, blocks=True)
    machine = linear.simulated(variant)
    launch = linear.launch(given, variant, machine, len(mine), warps)
    traces = [machine.trace(cta) for cta in range(len(mine))]
    l1_kib = machine.l1_kib(min(machine.occupancy.ctas, len(mine)))
    whole = machine.time(traces, timing=default_timing(**FED, l1_kib=l1_kib))
    more = max(1.0, whole.l2_bytes / weight_bytes(weight, k, given.columns))
    faster = {**FED, "l2_bytes_per_cycle": FED["l2_bytes_per_cycle"] * more}
    without_x = machine.time(traces, timing=default_timing(**faster, l1_kib=l1_kib))
    error = linear.worst(launch.out, given.result())
    return Time(V100.seconds(without_x.cycles), V100.seconds(whole.cycles), error, machine, ctas, warps)


FED = {name: getattr(feed_timing(), name) for name in ("l2_latency", "l2_bytes_per_cycle")}


def weight_bytes(weight: str, k: int, columns: int) -> float:
    """Bytes of weights and scales."""
    scales = 4 * (k // GROUP) * columns if weight != "e4m3" else 0  # e4m3: 1 in 4096 bytes
    return k * columns * (0.5 if weight == "int4" else 1) + scales


def row(weight: str, layer: str, rows: int) -> Row:
    k, columns = LAYERS[layer]
    variant = best(weight, rows, columns)
    found = simulated(weight, rows, k, columns, variant)
    size = weight_bytes(weight, k, columns)
    return compared(
        f"{weight} {layer} ({k} x {columns}) {rows} rows",
        "decode weight read rate",
        "GB/s",
        size / found.seconds / 1e9,
        better="higher",
        limit=FEED,
        megabytes=size / 1e6,
        microseconds=1e6 * found.seconds,
        pessimistic_fraction=size / found.pessimistic / 1e9 / FEED,
        error=found.error,
        registers=found.simulation.image.registers,
        kernel=variant.name,
        ctas=found.ctas,
        warps=found.warps,
    )


def launched(variant: LinearVariant) -> launcher.Variant:
    """What the launcher knows of a variant."""
    return launcher.Variant(**describe(variant))  # type: ignore[arg-type]


def best(weight: str, rows: int, columns: int) -> LinearVariant:
    """The variant that the launcher chooses."""
    fitting = {launched(one): one for one in VARIANTS if one.weight == weight}
    return fitting[launcher.variant_for(fitting, rows, columns)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there, after each one")
    parser.add_argument("--weights", nargs="*", default=list(WEIGHTS), choices=WEIGHTS)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--layers", nargs="*", default=list(LAYERS), choices=LAYERS)
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    found = []
    table = Table("case", "MB", "us", "x from L2", "all from DRAM", "largest error", title=TITLE)
    for weight in options.weights:
        for layer in options.layers:
            for rows in options.rows:
                one = row(weight, layer, rows)
                found.append(one)
                values = one.model_dump()
                console.print(f"simulated: {one.case}: {one.fraction_of_limit:.1%}")
                table.add_row(
                    one.case,
                    f"{values['megabytes']:.1f}",
                    f"{values['microseconds']:.1f}",
                    f"{one.fraction_of_limit:.1%}",
                    f"{values['pessimistic_fraction']:.1%}",
                    f"{values['error']:.1e}",
                )
                if options.json is not None:
                    kept = {name: text for name, text in versions().items() if name != "peer"}
                    report(found, TITLE, kept).write(options.json)
    console.print(table)


if __name__ == "__main__":
    main()
