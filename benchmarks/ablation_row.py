"""One row of an ablation: the same figure without and with a strategy.

Used by: ablation.py and its parts for the CPU, the V100 and the H200.
"""

from __future__ import annotations

from typing import Any

from fastattention_vllm.bench.report import Row, compared

TWO_LEVEL, SKIPPING, ALL_REDUCE, HOST = (
    "two-level tiling",
    "mask skipping",
    "tiling-AllReduce",
    "host layers",
)
CLOSE = 1e-2
"""Allowed difference between outputs of two builds, for values of about 1."""


def row(
    strategy: str, where: str, case: str, metric: str, unit: str, off: float, on: float, kind: str, **more: Any
) -> Row:
    """``ratio`` is above 1 where the strategy gains. ``kind``: measured or simulated."""
    return compared(
        f"{where}, {case}",
        metric,
        unit,
        on,
        better="lower" if unit in ("ms", "s") else "higher",
        peer_name=f"without {strategy}",
        peer=off,
        strategy=strategy,
        where=where,
        kind=kind,
        **more,
    )
