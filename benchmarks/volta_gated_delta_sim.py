"""Prompts in Gated DeltaNet layers on the simulated V100, beside the time of the model's matrix products.

    python benchmarks/volta_gated_delta_sim.py --json FILE

Run by: contributors who change kernels/volta/src/gated_delta_*.cu.
Needs: `make setup-dev`, and about two minutes of one core. No GPU.

Every time is simulated: both launches of a layer of Qwen3.5-27B's shape, for one request. CTAs of the busiest SM are
simulated, out of DRAM at 817 GB/s for the SMs that have a CTA. Time is linear in the number of chunks: the kernel of
chunks is simulated with up to twelve CTAs, and the scan with one chunk and with three. Launches, and what torch does
besides, are not simulated. The matrix products are those of volta_gated_delta.py, at an assumed rate.

Decoding requests come with prompts. For requests of one token, the limit is the time in which states are read and
written.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from volta_gated_delta import KEY_HEADS, LAYERS, MUST, VALUE_HEADS, beside_products
from volta_sim_report import FEED, TITLE, versions
from volta_sim_rows import feed_timing

from fastattention_vllm.attention.volta.gated_delta import Schedule, gated_delta_rule
from fastattention_vllm.bench.report import Row, compared, report
from kernels.volta import gated_delta_problems as kernels
from kernels.volta.gated_delta_variants import CHUNK, SCANS, SIZE, GatedDeltaVariant
from kernels.volta.sim import V100, Simulation, Timing, default_timing

SIMULATED_CTAS = (6, 12)
SIMULATED_CHUNKS = (1, 3)


def chosen(heads: int) -> GatedDeltaVariant:
    """The widest slices that give each SM a CTA at most, as the launcher chooses for one request."""
    small, large = SCANS
    return small if heads * (SIZE // small.values) <= V100.sms else large


@dataclass(frozen=True)
class Line:
    """Cycles of an SM as a line: those of ``amounts[0]`` and of ``amounts[1]`` units of work."""

    amounts: tuple[int, int]
    cycles: tuple[float, float]
    error: float
    simulation: Simulation

    def at(self, amount: float) -> float:
        slope = (self.cycles[1] - self.cycles[0]) / (self.amounts[1] - self.amounts[0])
        return self.cycles[1] + slope * (amount - self.amounts[1])


def problem(lengths: list[int], heads: int = 1) -> kernels.Problem:
    generator = torch.Generator().manual_seed(0)
    starts = [0, *itertools.accumulate(lengths)]
    tokens = starts[-1]
    q, k = (torch.randn(tokens, 1, SIZE, generator=generator).half().numpy() for _ in range(2))
    v = torch.randn(tokens, heads, SIZE, generator=generator).half().numpy()
    g = (-0.1 * torch.rand(tokens, heads, generator=generator)).numpy()
    beta = torch.rand(tokens, heads, generator=generator).numpy()
    states = torch.randn(len(lengths), heads, SIZE, SIZE, generator=generator).numpy()
    return kernels.Problem(q, k, v, g, beta, states, starts)


@functools.cache
def of_ctas(kind: str, tokens: int) -> Line:
    """The kernel of chunks or the widest scan, by the number of CTAs of an SM, each with one chunk of ``tokens``."""
    few, many = SIMULATED_CTAS
    launch = kernels.Launch(problem([tokens] * many), SCANS[-1], kernels.simulated)
    launch.run()
    machine, _ = launch.machines[kind]
    traces = [machine.trace(0, y) for y in range(many)]
    timing = fed(V100.sms, machine.l1_kib(machine.occupancy.ctas))
    times = tuple(float(machine.time(traces[:count], timing=timing).cycles) for count in (few, many))
    return Line((few, many), (times[0], times[1]), 0.0, machine)


def fed(sms: int, l1_kib: int) -> Timing:
    """DRAM feeds ``sms`` SMs, but none faster than L2 does."""
    feed, whole = feed_timing(), default_timing()
    rate = min(feed.l2_bytes_per_cycle * V100.sms / sms, whole.l2_bytes_per_cycle)
    return default_timing(l2_latency=feed.l2_latency, l2_bytes_per_cycle=rate, l1_kib=l1_kib)


@functools.cache
def of_scan(scan: GatedDeltaVariant, ctas: int) -> Line:
    """The scan, by the number of chunks. ``ctas``: of the launch, each on an SM of its own."""
    if ctas > V100.sms:
        raise ValueError(f"{ctas} CTAs are more than {V100.sms} SMs; pass fewer heads.")
    times, error = [], 0.0
    for chunks in SIMULATED_CHUNKS:
        given = problem([chunks * CHUNK])
        launch = kernels.Launch(given, scan, kernels.simulated)
        out, states = launch.run()
        error = max(error, *errors(given, out, states))
        machine, _ = launch.machines["scan"]
        timing = fed(ctas, machine.l1_kib(1))
        times.append(float(machine.time([machine.trace(0)], timing=timing).cycles))
    return Line(SIMULATED_CHUNKS, (times[0], times[1]), error, machine)


def errors(given: kernels.Problem, out: kernels.Array, states: kernels.Array) -> tuple[float, float]:
    """The largest differences from torch's operators in fp32."""
    tensors = (torch.from_numpy(x) for x in (given.q, given.k, given.v, given.g, given.beta, given.states))
    q, k, v, g, beta, before = (x.float() for x in tensors)
    schedule = Schedule(list(given.starts), 1 << 20, torch.device("cpu"))
    expected, after = gated_delta_rule(q, k, v, g, beta, before, schedule, normalise=True)
    return float((torch.from_numpy(out) - expected).abs().max()), float((torch.from_numpy(states) - after).abs().max())


def row(tokens: int, gpus: int) -> Row:
    heads = VALUE_HEADS // gpus
    scan, chunks = chosen(heads), -(-tokens // CHUNK)
    ctas = heads * (SIZE // scan.values)
    by_cta, by_chunk = of_ctas("chunk", CHUNK), of_scan(scan, ctas)
    first = V100.seconds(by_cta.at(-(-chunks * heads // V100.sms)))
    second = V100.seconds(by_chunk.at(chunks))
    return beside_products(
        tokens,
        gpus,
        "simulated",
        LAYERS * (first + second),
        milliseconds_of_chunks=1000 * LAYERS * first,
        milliseconds_of_scan=1000 * LAYERS * second,
        cycles_of_a_chunk_in_the_scan=by_chunk.at(2) - by_chunk.at(1),
        scan=scan.name,
        ctas=ctas,
        registers=by_chunk.simulation.image.registers,
        registers_of_chunks=by_cta.simulation.image.registers,
        error=by_chunk.error,
        key_heads=KEY_HEADS // gpus,
        value_heads=heads,
    )


def decode_row(requests: int, gpus: int) -> Row:
    heads = VALUE_HEADS // gpus
    ctas = -(-requests * heads // V100.sms)
    seconds = [V100.seconds(of_ctas(kind, 1).at(ctas)) for kind in ("chunk", "scan")]
    read_and_written = 2 * 4 * SIZE * SIZE * heads * requests
    return compared(
        f"Gated DeltaNet of Qwen3.5-27B, {requests} requests of one token, TP {gpus}",
        "decode time, simulated",
        "ms",
        1000 * LAYERS * sum(seconds),
        better="lower",
        limit=1000 * LAYERS * read_and_written / (1e9 * FEED),
        milliseconds_of_chunks=1000 * LAYERS * seconds[0],
        milliseconds_of_scan=1000 * LAYERS * seconds[1],
        value_heads=heads,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4], choices=list(MUST))
    parser.add_argument("--requests", type=int, nargs="*", default=[64], help="of one token each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row(tokens, gpus) for gpus in options.gpus for tokens in options.tokens]
    table = Table(title="V100, simulated: Gated DeltaNet layers of Qwen3.5-27B beside the matrix products")
    for name in ("case", "ms", "of products", "wanted", "chunks, ms", "scan, ms", "cycles a chunk", "error"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for one in rows:
        more = one.model_extra or {}
        table.add_row(
            one.case,
            f"{one.ours:.1f}",
            f"{more['share']:.1%}",
            f"{(one.limit or 0) / (one.peer or 1):.0%}",
            f"{more['milliseconds_of_chunks']:.1f}",
            f"{more['milliseconds_of_scan']:.1f}",
            f"{more['cycles_of_a_chunk_in_the_scan']:.0f}",
            f"{more['error']:.1e}",
        )
    Console(width=150).print(table)
    decoding = [decode_row(requests, gpus) for gpus in options.gpus for requests in options.requests]
    for one in decoding:
        print(f"{one.case}: {one.ours:.1f} ms, {one.fraction_of_limit:.0%} of the limit")
    if options.json:
        kept = {name: text for name, text in versions().items() if name != "peer"}
        report([*rows, *decoding], TITLE, kept).write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
