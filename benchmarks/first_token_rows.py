"""Rows of first_token.py: measured ones and predicted ones.

Used by: first_token.py.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from first_token_prediction import PREDICTED, Parts, predicted

from fastattention_vllm.bench.report import Row, compared

OF_THE_MODEL = {"8B": 32, "70B": 80}
"""Layers of the whole model."""


def rows_of(link: str, took: Mapping[tuple[int, str], Sequence[float]], options: argparse.Namespace) -> list[Row]:
    """Rows for each engine compared with the same number of GPUs without tiling, and for that compared with one GPU."""
    middle = {kind: 1e3 * statistics.median(times) for kind, times in took.items()}
    rows = []
    for (ranks, way), ours in middle.items():
        peer = (1, "off") if way == "off" else (ranks, "off")
        rounds = {"rounds ms": [round(1e3 * seconds, 3) for seconds in took[ranks, way]]}
        case = f"{_case(link, ranks, options)}, tiling {way}"
        row = _row("measured", case, ours, peer, middle.get(peer) if ranks > 1 else None, **rounds)
        rows.append(row)
    return rows


def _case(link: str, ranks: int, options: argparse.Namespace) -> str:
    model = "tiny" if options.tiny else options.model
    of = "" if options.tiny else f" of {OF_THE_MODEL[model]}"
    return (
        f"{model} layers, {options.layers}{of}, {options.tokens} tokens, {ranks} ranks, {link}, "
        f"{'graphs' if options.graphs else 'eager'}"
    )


def _row(kind: str, case: str, ours: float, peer_kind: tuple[int, str], peer: float | None, **more: Any) -> Row:
    ranks, way = peer_kind
    return compared(
        case,
        "overlap time to first token",
        "ms",
        ours,
        better="lower",
        peer_name=f"{ranks} rank{'s' if ranks > 1 else ''}, tiling {way}" if peer else None,
        peer=peer,
        kind=kind,
        **more,
    )


def predicted_rows(
    link: str, took: Mapping[tuple[int, str], Sequence[float]], parts: Parts, options: argparse.Namespace
) -> list[Row]:
    rows = []
    measured = {ranks: statistics.median(times) for (ranks, way), times in took.items() if way == "off"}
    one_gpu = measured[1]
    for ranks in PREDICTED:
        found = predicted(parts, measured, options.layers, options.tokens, ranks)
        for way, ours in found.items():
            peer, kind = (one_gpu, (1, "off")) if way == "off" else (found["off"], (ranks, "off, predicted"))
            case = f"{_case(link, ranks, options)}, tiling {way}, predicted"
            rows.append(_row("predicted", case, 1e3 * ours, kind, 1e3 * peer))
    return rows
