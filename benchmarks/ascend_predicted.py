"""What two-level tiling, the tiling-mask, skipping and running ahead are worth on a 910B: predicted, not measured.

    PYTHONPATH=.:build/ascend/triton PYTHON benchmarks/ascend_predicted.py --json FILE

Run by: contributors, after `scripts/ascend.py --set-up-only`. PYTHON is build/ascend/2.10.0.post4/venv/bin/python. It
takes some minutes.
Needs: no NPU and no CANN. Every form of the kernel is compiled for a 910B1 and timed by the model in kernels/ascend,
whose README says how far its times can be trusted. ascend_predicted_tables.py makes the tables and the chart of
docs/ascend.md from the result.

Rows that lose stay. The exit status is 1 if a goal of the project is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from ascend_predicted_forms import (
    Form,
    decode_bytes,
    decode_cycles,
    decode_form,
    decode_seconds,
    full_cycles,
    prefill_flops,
    prefill_seconds,
    run,
    whole_tile,
)

from fastattention_vllm.attention.ascend_triton.masks import PAGE
from fastattention_vllm.attention.ascend_triton.specializations import PREFILL_ROWS, Specialization
from fastattention_vllm.bench.report import Row, compared, report
from kernels.ascend.simulation import Predicted
from kernels.ascend.tables import CHIPS, TABLE_CLOCK_MHZ
from scripts import ascend_calls, ascend_predict
from scripts.ascend_calls import Heads

HEADS = Heads(32, 8, 128)
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
PREFILL = Specialization("prefill", "fp16", 128, PREFILL_ROWS[128])
ONE_PAGE = {"STEP": 1}
NOT_AHEAD = {"set_workspace_multibuffer": 1}
TWO_LEVEL = Form("512 keys, running ahead", PREFILL)
ONE_LEVEL = Form("128 keys, nothing ahead", PREFILL, constants=ONE_PAGE, options=NOT_AHEAD)
TILINGS = (
    TWO_LEVEL,
    Form("512 keys, nothing ahead", PREFILL, options=NOT_AHEAD),
    Form("128 keys, running ahead", PREFILL, constants=ONE_PAGE),
    ONE_LEVEL,
)
NOTHING, TILE, COMPARE, WHOLE = range(4)
MASKS = {
    "tiling-mask at the diagonal": (TILE, 1, 1),
    "compare at the diagonal": (COMPARE, 1, 1),
    "whole mask at the diagonal": (WHOLE, 1, 1),
    "tiling-mask in every block": (TILE, 0, 1),
    "compare in every block": (COMPARE, 0, 1),
    "whole mask in every block": (WHOLE, 0, 1),
    "no mask at the diagonal, wrong": (NOTHING, 1, 1),
    "no block skipped": (TILE, 1, 0),
}
"""How pages are masked; whether only pages at the diagonal are; whether pages above it are skipped."""
FIXPIPE_GBS = (42, 62, 70, 100)
GOALS = {
    "full": ("prefill rate full 8K, TFLOPS", 100.0),
    "causal": ("prefill rate causal 8K, TFLOPS", 87.0),
    "levels": ("two-level against one-level, full 8K", 2.5),
    "decode": ("decode program of 16 pages, 4 heads per KV head, TB/s", 1.4),
}


def peak(chip: str) -> float:
    """TFLOPS of the cube units."""
    return CHIPS[chip].cores * 2 * 16**3 * CHIPS[chip].mhz / 1e6


def tflops(form: Form, tokens: int, *, causal: bool, **more: Any) -> float:
    window = {name: value for name, value in more.items() if name == "window"}
    seconds = prefill_seconds(form, HEADS, tokens, causal=causal, **more)
    return prefill_flops(HEADS, tokens, causal=causal, **window) / seconds / 1e12


def kind(causal: bool) -> str:
    return "causal" if causal else "full"


def details(form: Form, found: Predicted) -> dict[str, Any]:
    """Of one tile of 128 queries: where its time and its bytes go."""
    counts = found.counts
    return {
        "tile_microseconds": found.cycles / CHIPS[ascend_predict.FIRST].mhz,
        "busy": {pipe: cycles / found.cycles for pipe, cycles in found.busy.items()},
        "tile_bytes": found.moved,
        "tile_cross_core_flags": counts["AIC sync_block_set"] + counts["AIV sync_block_set"],
        "tile_flags": counts["AIC set_flag"] + counts["AIV set_flag"],
        "memory": form.memory,
        "vector_cycles": found.busy["AIV V"],
    }


def tiling_rows() -> Iterator[Row]:
    """Two levels against one, and each of its two parts alone."""
    for causal in (False, True):
        for tokens in TOKENS:
            ours = tflops(TWO_LEVEL, tokens, causal=causal)
            for form in TILINGS[1:]:
                peer = tflops(form, tokens, causal=causal)
                yield rate(f"prefill D128 {kind(causal)} {tokens // 1024}K", ours, form.name, peer)
    for form in TILINGS:
        found = whole_tile(form, HEADS, 64)
        yield compared(
            f"tile of 128 queries and 8192 keys, {form.name}",
            "prefill time of a tile",
            "us",
            found.cycles / CHIPS[ascend_predict.FIRST].mhz,
            better="lower",
            **details(form, found),
        )


def rate(case: str, ours: float | None, peer_name: str | None = None, peer: float | None = None, **more: Any) -> Row:
    chip = more.pop("chip", ascend_predict.FIRST)
    return compared(
        case, "prefill rate", "TFLOPS", ours, better="higher", peer_name=peer_name, peer=peer, limit=peak(chip), **more
    )


def mask_rows() -> Iterator[Row]:
    """Masks, and skipping, of a causal prompt of 8K."""
    ours = tflops(TWO_LEVEL, 8192, causal=True)
    for name, (mask, unmasked, skip) in MASKS.items():
        constants = {"MASK": mask, "UNMASKED": unmasked, "SKIP": skip}
        form = Form(name, PREFILL, masks=True, constants=constants)
        matrix = {TILE: 2 * PAGE * 3 * PAGE, WHOLE: 2 * 8192**2}.get(mask, 0)
        case = "prefill D128 causal 8K"
        if form.refusal:
            yield rate(case, ours, name, None, refused=form.refusal, mask_bytes=matrix)
            continue
        found = run(form, ascend_calls.prefill(HEADS, 8192, 63, PREFILL.rows, causal=True))
        peer = tflops(form, 8192, causal=True) if skip else without_skipping(form)
        yield rate(case, ours, name, peer, mask_bytes=matrix, **details(form, found))
    for tokens in (8192, 32768):
        window = tflops(TWO_LEVEL, tokens, causal=True, window=1023)
        yield rate(f"prefill D128 window 1024, {tokens // 1024}K", window)


def without_skipping(form: Form) -> float:
    """TFLOPS of what is seen, from every seventh tile: a tile's time depends on the pages after it, too."""
    tiles = 8192 // PREFILL.rows
    calls = [ascend_calls.prefill(HEADS, 8192, number, PREFILL.rows, causal=True) for number in range(0, tiles, 7)]
    mean = sum(run(form, call).cycles for call in calls) / len(calls)
    chip = CHIPS[ascend_predict.FIRST]
    seconds = mean * tiles * HEADS.query / chip.cores / chip.mhz / 1e6
    return prefill_flops(HEADS, 8192, causal=True) / seconds / 1e12


def chip_rows() -> Iterator[Row]:
    """Other chips, head sizes, and the number that matters most."""
    for chip in CHIPS:
        for causal in (False, True):
            yield rate(
                f"prefill D128 {kind(causal)} 8K, {chip}", tflops(TWO_LEVEL, 8192, causal=causal, chip=chip), chip=chip
            )
    for size, rows in PREFILL_ROWS.items():
        if size != 128:
            one = Specialization("prefill", "fp16", size, rows)
            form, heads = Form(one.name, one), Heads(32, 8, size)
            for causal in (False, True):
                seconds = prefill_seconds(form, heads, 8192, causal=causal)
                flops = prefill_flops(heads, 8192, causal=causal)
                yield rate(f"prefill D{size} {kind(causal)} 8K", flops / seconds / 1e12)
    call = ascend_calls.prefill(HEADS, 8192, 63, PREFILL.rows, causal=False)
    for gbs in FIXPIPE_GBS:
        known = ascend_predict.tables()
        bandwidth = known.bandwidth | {("L0C", "L2"): gbs * 1e3 / TABLE_CLOCK_MHZ}
        slower = run(TWO_LEVEL, call, tables=replace(known, bandwidth=bandwidth)).cycles
        ours = tflops(TWO_LEVEL, 8192, causal=False) * full_cycles(TWO_LEVEL, HEADS, 64, "910B1") / slower
        yield rate(f"prefill D128 full 8K, fixpipe {gbs} GB/s per core", ours)


def decode_rows() -> Iterator[Row]:
    limit = ascend_predict.tables().bandwidth["GM", "L2"] * TABLE_CLOCK_MHZ / 1e3
    for size in PREFILL_ROWS:
        for group in (1, 4, 8, 16, 32, 64):
            heads = Heads(8 * group, 8, size)
            for kept, sequences in ((1024, 16), (4096, 1), (4096, 16), (32768, 1), (32768, 16), (131072, 1)):
                if size == 128 or (kept, sequences) == (32768, 16):
                    seconds, each = decode_seconds(heads, kept, sequences)
                    yield decoded(
                        f"decode D{size} {kept // 1024}K b{sequences}, {group} heads per KV head",
                        decode_bytes(heads, kept, sequences) / seconds / 1e9,
                        limit,
                        pages=each,
                    )
    for group in (1, 4, 8, 16, 32, 64):
        heads = Heads(8 * group, 8, 128)
        form = decode_form("fp16", 128, max(16, group))
        for pages in (4, 8, 16, 32, 64, 256):
            seconds = decode_cycles(form, heads, pages, 1, "910B1") / CHIPS["910B1"].mhz / 1e6
            gbs = CHIPS["910B1"].cores * decode_bytes(replace(heads, kv=1), pages * PAGE, 1) / seconds / 1e9
            yield decoded(f"decode D128 program of {pages} pages, {group} heads per KV head", gbs, limit)


def decoded(case: str, gbs: float, limit: float, **more: Any) -> Row:
    return compared(case, "decode rate", "GB/s", gbs, better="higher", limit=limit, **more)


def goals(rows: list[Row]) -> Iterator[tuple[str, float, float]]:
    """Name, value and limit of each goal."""
    found = {(row.case, row.metric, row.peer_name): row for row in rows}
    full = found["prefill D128 full 8K", "prefill rate", ONE_LEVEL.name]
    causal = found["prefill D128 causal 8K", "prefill rate", ONE_LEVEL.name]
    program = found["decode D128 program of 16 pages, 4 heads per KV head", "decode rate", None]
    values = {"full": full.ours, "causal": causal.ours, "levels": full.ratio, "decode": (program.ours or 0.0) / 1e3}
    for name, (text, limit) in GOALS.items():
        yield text, values[name] or 0.0, limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="write the result to this file")
    options = parser.parse_args()
    rows = []
    for part in (tiling_rows, mask_rows, chip_rows, decode_rows):
        for row in part():
            rows.append(row)
            print(f"{row.case}: predicted {row.ours or 0.0:.1f} {row.unit}; {row.peer_name}: {row.peer}", flush=True)
    versions = {name: metadata.version(name) for name in ("triton-ascend", "ascendnpu-ir", "msopmodeling")}
    found = list(goals(rows))
    note = "Predicted by the model in kernels/ascend. Not yet run on hardware."
    texts = [{"goal": text, "value": value, "limit": limit} for text, value, limit in found]
    report(rows, "Ascend 910B1, predicted", versions, note=note, goals=texts).write(options.json)
    for text, value, limit in found:
        print(f"{'met' if value >= limit else 'MISSED'}: {text}: {value:.2f}, goal {limit}")
    return int(any(value < limit for _, value, limit in found))


if __name__ == "__main__":
    sys.exit(main())
