"""The V100 kernels and PyTorch's own on the simulated V100: TFLOPS of prefill, GB/s of decoding, static bounds, errors.

    python benchmarks/volta_sim.py --json FILE --plot FILE.png
    python benchmarks/volta_sim.py --from FILE.json --plot FILE.png     # from a saved run
    python benchmarks/volta_sim.py --no-peer --kinds grouped --head-sizes 256 --json FILE
    python benchmarks/volta_sim.py --no-peer --kinds ragged --head-sizes 64 80 96 112 128 192 256 --json FILE

Run by: contributors who change a V100 kernel.
Needs: `make setup-dev`, and hours of one core for all rows (--kinds, --tokens and --head-sizes choose some). No GPU.

Every time is simulated (kernels/volta/sim/README.md says how far to trust it): 80 SMs at 1.38 GHz, peak 113 TFLOPS. The
peer is what both PyTorch and xformers run on a V100, as machine code out of PyPI's wheel of torch 2.10.0 (volta_peer.py
downloads 915 MB once, or takes that wheel's library by --libtorch). volta_sim_rows.py says how a launch is timed.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import volta_peer
from rich.console import Console
from volta_launches import (
    our_prefill,
    peer_prefill,
)
from volta_sim_report import (
    CONTEXTS,
    GROUPED_TOKENS,
    GROUPS,
    HEAD_SIZES,
    OURS,
    PEER,
    RAGGED,
    SPECULATIVE,
    TOKENS,
    Measured,
    label,
    report_of,
)
from volta_sim_rows import PUBLISHED, decode_row, grouped_row, masks_row, method_row, prefill_row
from volta_sim_tables import draw, print_report

from fastattention_vllm.bench.saved_report import saved_report
from kernels.volta.sim import Cubin

KINDS = ("method", "prefill", "decode", "masks", "speculative", "ragged", "grouped")


def sweep(
    content: Cubin | None, tokens: Sequence[int], head_sizes: Sequence[int], kinds: Sequence[str]
) -> list[Callable[[], Measured]]:
    """All rows, the most informative first. Without ``content`` there is no peer."""
    jobs: list[Callable[[], Measured]] = []
    if content is not None and "method" in kinds:
        jobs += [functools.partial(method_row, content, *line) for line in PUBLISHED if line[0] in head_sizes]

    def prefill(count: int, head_size: int, causal: bool) -> None:
        shape = (count, head_size, causal)
        jobs.append(lambda: prefill_row(OURS, our_prefill(*shape), *shape))
        if content is not None:
            jobs.append(lambda: prefill_row(PEER, peer_prefill(content, *shape), *shape))

    for number, length in enumerate(tokens):
        for head_size in head_sizes if "prefill" in kinds else ():
            for causal in (False, True):
                prefill(length, head_size, causal)
        if number == 0 and "decode" in kinds:
            for context, batch in CONTEXTS:
                for head_size in head_sizes:
                    for group in GROUPS:
                        for page in (16, 784):
                            jobs.append(functools.partial(decode_row, head_size, group, page, context, batch))
        if number == 0 and "masks" in kinds:
            jobs += [functools.partial(masks_row, h, 4096, causal) for h in head_sizes for causal in (False, True)]
    if "grouped" in kinds:
        jobs += [
            functools.partial(grouped_row, h, count, causal, page)
            for h in head_sizes
            for count in GROUPED_TOKENS
            for causal in (False, True)
            for page in (16, 784)
        ]
    if "ragged" in kinds:
        keys, batch, page = RAGGED
        jobs += [functools.partial(decode_row, h, group, page, keys, batch) for group in (6, 7) for h in head_sizes]
    if "speculative" in kinds:
        keys, group, kv_heads = SPECULATIVE
        jobs += [
            functools.partial(decode_row, h, group, 16, keys, batch, queries=queries, kv_heads=kv_heads)
            for batch, new in ((1, (1, 2, 3, 4, 5)), (8, (1, 4)))
            for h in head_sizes
            for queries in new
        ]
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there, after each one")
    parser.add_argument("--plot", type=Path, help="draw a PNG")
    parser.add_argument(
        "--from",
        dest="sources",
        type=saved_report,
        nargs="+",
        help="join these results instead of simulating; later rows replace earlier ones",
    )
    parser.add_argument("--libtorch", type=Path, help=f"libtorch_cuda.so of the PyPI wheel {volta_peer.WHEEL}")
    parser.add_argument("--no-peer", action="store_true", help="leave the peer out, and its download")
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS), help="lengths of prefill")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS, help="kinds of rows")
    parser.add_argument("--head-sizes", type=int, nargs="*", default=list(HEAD_SIZES))
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 180)
    rows: list[Measured] = []
    if options.sources:
        saved = [json.loads(path.read_text()) for path in options.sources]
        joined = {(row["kernel"], label(row), row.get("what")): row for one in saved for row in one["rows"]}
        rows = list(joined.values())
        found = report_of(rows).model_copy(update={key: saved[0][key] for key in ("date", "versions")})
        if options.json is not None:
            found.write(options.json)
    else:
        content = None if options.no_peer else Cubin(volta_peer.cubin(options.libtorch))
        for job in sweep(content, options.tokens, options.head_sizes, options.kinds):
            start = time.perf_counter()
            rows.append(job())
            what = {key: value for key, value in rows[-1].items() if key in ("tflops", "gbs", "cost", "error", "ratio")}
            words = ", ".join(f"{key} {value:.3g}" for key, value in what.items())
            seconds = time.perf_counter() - start
            console.print(f"simulated: {rows[-1]['kernel']}, {label(rows[-1])}: {words} ({seconds:.0f} s)")
            if options.json is not None:
                report_of(rows).write(options.json)
        found = report_of(rows)
    print_report(found, console)
    if options.plot is not None:
        draw(found, options.plot)


if __name__ == "__main__":
    main()
