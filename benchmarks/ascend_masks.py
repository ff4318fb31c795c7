"""Memory of a causal mask by sequence length: the whole mask, and the 2048 x 2048 triangle that the NPU's operator
reads.

    python benchmarks/ascend_masks.py --json FILE

Run by: contributors, for the table in docs/ascend.md.
Needs: as much free host memory as the largest mask (4 GiB at 65536 tokens). No NPU.

Each mask is allocated in a fresh process, in host memory, with one byte per number as the operator takes it. The
process writes to it and reports how much memory it then occupies.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from fastattention_vllm.attention import ascend
from fastattention_vllm.bench import machine
from fastattention_vllm.bench.report import Row, compared, report

MIB = 1 << 20
LENGTHS = [2048, 4096, 8192, 16384, 32768, 65536]
RESERVE = 2 << 30
"""Bytes to leave free for other processes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--allocate", choices=["whole", "triangle"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.allocate:
        print(allocate(options.allocate, options.tokens[0]))
        return 0
    rows = [row(tokens) for tokens in options.tokens]
    print(f"{'tokens':>8}  {'whole mask':>12}  {'triangle':>9}  {'ratio':>8}")
    for found in rows:
        whole = "not enough memory" if found.peer is None else f"{found.peer:>8.1f} MiB"
        ratio = "" if found.ratio is None else f"{found.ratio:>8.1f}"
        print(f"{found.case.split()[-1]:>8}  {whole:>12}  {found.ours:>5.1f} MiB  {ratio}")
    if options.json:
        report(rows, machine.hardware(1)).write(options.json)
    return 0


def row(tokens: int) -> Row:
    ours = measured("triangle", tokens) / MIB
    fits = tokens * tokens + RESERVE < machine.available_memory()
    whole = measured("whole", tokens) / MIB if fits else None
    return compared(
        f"mask {tokens}",
        "memory of the mask",
        "MiB",
        ours,
        better="lower",
        peer_name="whole mask, one byte a number",
        peer=whole,
    )


def measured(kind: str, tokens: int) -> int:
    """Bytes by which a fresh process grows when it allocates such a mask."""
    command = [sys.executable, __file__, "--allocate", kind, "--tokens", str(tokens)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def allocate(kind: str, tokens: int) -> int:
    # Memory that torch allocates at its first use does not belong to the mask.
    torch.ones(64, 64, dtype=torch.int8).triu(1).triu_(1).count_nonzero()
    before = occupied()
    if kind == "triangle":
        mask = ascend.compressed_mask(torch.device("cpu"))
    else:
        mask = torch.ones(tokens, tokens, dtype=torch.int8).triu_(1)
    assert mask.count_nonzero() == len(mask) * (len(mask) - 1) // 2
    return occupied() - before


def occupied() -> int:
    """Bytes of this process that are resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    sys.exit(main())
