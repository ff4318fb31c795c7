"""The V100's part of ablation.py: kernels compiled without a strategy, on the simulated V100.

Used by: ablation.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ablation_row import CLOSE, SKIPPING, TWO_LEVEL, row

from fastattention_vllm.bench.report import Row

V100_EVERY_KEY = (
    (
        "some_end = (max(0, end_of(last_position) - origin) + kTile - 1) / kTile;",
        "some_end = (kv_len + kTile - 1) / kTile;",
    ),
)
V100_COMPARED = (
    ("const int all_begin = min(some_end, max(some_begin, (begin_of(last_position) - origin + kTile - 1) / kTile));",
     "const int all_begin = some_end;"),
    ("const int all_end = max(all_begin, min(some_end, (end_of(first_position) - origin) / kTile));",
     "const int all_end = some_end;"),
)  # fmt: skip
ONE_PANEL = {"warps": 1, "tile": 32, "ctas_per_sm": 3}
"""A CTA is one warp, so tiles in shared memory serve only its 32 rows. Three CTAs fit on an SM."""


def v100_rows(options: argparse.Namespace) -> list[Row]:
    import volta_launches

    every_key = V100_EVERY_KEY + V100_COMPARED
    without: dict[str, tuple[Sequence[tuple[str, str]], bool]] = {
        f"{TWO_LEVEL} (one panel)": ((), True),
        f"{SKIPPING} (comparisons in every tile)": (V100_COMPARED, False),
        SKIPPING: (every_key, False),
        f"{TWO_LEVEL} (one panel) and {SKIPPING}": (every_key, True),
    }
    rows = []
    for head_size in options.v100_head_sizes:
        on = v100_seconds(volta_launches, options.v100_tokens, head_size, (), False)
        for name, (edits, one_panel) in without.items():
            off = v100_seconds(volta_launches, options.v100_tokens, head_size, edits, one_panel)
            case = f"prefill fp16 head size {head_size}, {options.v100_tokens} tokens, causal"
            rows.append(row(name, "V100", case, "prefill", "ms", 1e3 * off, 1e3 * on, "simulated"))
            print(f"V100, {case}, without {name}: {1e3 * off:.2f} ms, with {1e3 * on:.2f} ms", flush=True)
    return rows


def v100_seconds(
    volta_launches: Any, tokens: int, head_size: int, edits: Sequence[tuple[str, str]], one_panel: bool
) -> float:
    """Seconds of a whole launch (volta_launches.py). The result is compared with float64."""
    variant = volta_launches.variants.prefill(head_size)
    if one_panel:
        variant = dataclasses.replace(variant, **ONE_PANEL)
    edit: Callable[[str], str] = volta_launches.everything
    if edits:
        edit = Compiled(volta_launches.compiled_out, tuple(edits))
    launch, error = volta_launches.our_prefill(tokens, head_size, True, edit=edit, variant=variant)
    if set(V100_EVERY_KEY) <= set(edits):
        launch.works = [float(tokens) + variant.tile] * len(launch.works)
        launch.alike = True
    seconds = float(volta_launches.whole_launch(launch, volta_launches.BATCH * volta_launches.HEADS).seconds)
    if not (wrong := error()) < CLOSE:
        sys.exit(f"ablation: the V100 kernel without {edits or one_panel} is wrong by {wrong}.")
    return seconds


@dataclasses.dataclass(frozen=True)
class Compiled:
    """An edit that equals other edits with the same replacements, so that compiled kernels can be cached."""

    compiled_out: Callable[[Sequence[tuple[str, str]], str], str]
    replacements: tuple[tuple[str, str], ...]

    def __call__(self, source: str) -> str:
        return self.compiled_out(self.replacements, source)
