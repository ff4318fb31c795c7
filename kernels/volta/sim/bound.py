"""A lower bound of a CTA's time: the cycles that each unit of an SM needs for it if nothing waits."""

from __future__ import annotations

from kernels.volta.sim.simulation import Simulation, Trace
from kernels.volta.sim.timing import SUB_CORES, default_timing

SECTOR_BYTES = 32


def static_bound(simulation: Simulation, trace: Trace) -> dict[str, float]:
    """Cycles per unit, the largest first. ``ISSUE``: instruction slots; ``SHARED``: the path to shared memory and L1;
    ``L2``: as if L1 cached nothing."""
    timing = default_timing()
    cycles: dict[str, float] = {}
    issued = shared = sectors = 0.0
    for facts, count, moved in zip(simulation.instructions, trace.executions, trace.transactions, strict=True):
        executions, transactions = int(count), int(moved)
        if not executions:
            continue
        issued += executions
        cycles[facts.pipe] = cycles.get(facts.pipe, 0.0) + executions * facts.occupancy / SUB_CORES
        if facts.access == "shared load":
            shared += max(transactions, executions * max(1, facts.width // 4))
        elif facts.access == "shared store":
            shared += transactions
        elif facts.access == "shuffle":
            shared += executions
        elif facts.access:
            sectors += transactions
    cycles["ISSUE"] = issued / SUB_CORES
    cycles["SHARED"] = shared + sectors * SECTOR_BYTES / timing.l1_bytes_per_cycle
    cycles["L2"] = sectors * SECTOR_BYTES / timing.l2_bytes_per_cycle
    return dict(sorted(cycles.items(), key=lambda item: -item[1]))
