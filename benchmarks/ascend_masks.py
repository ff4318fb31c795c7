"""Memory of a causal mask, by sequence length: a whole one, and the 2048 x 2048 triangle that the NPU's operator reads.

    python benchmarks/ascend_masks.py --json FILE

Each mask is allocated in a process of its own, in host memory, with one byte a number as the operator takes it, written
to and measured by what the process then occupies. It needs no NPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from fastattention_vllm.attention import ascend
from fastattention_vllm.bench import machine

MIB = 1 << 20
LENGTHS = [2048, 4096, 8192, 16384, 32768, 65536]
RESERVE = 2 << 30
"""Bytes to leave to others."""


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
        whole = "not enough memory" if found["peer"] is None else f"{found['peer']:>8.1f} MiB"
        ratio = "" if found["ratio"] is None else f"{found['ratio']:>8.1f}"
        print(f"{found['case'].split()[-1]:>8}  {whole:>12}  {found['ours']:>5.1f} MiB  {ratio}")
    if options.json:
        report = {
            "hardware": machine.hardware(1),
            "versions": machine.versions(),
            "date": datetime.date.today().isoformat(),
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def row(tokens: int) -> dict[str, Any]:
    ours = measured("triangle", tokens) / MIB
    fits = tokens * tokens + RESERVE < machine.available_memory()
    whole = measured("whole", tokens) / MIB if fits else None
    return {
        "case": f"mask {tokens}",
        "metric": "memory of the mask",
        "unit": "MiB",
        "ours": ours,
        "peer_name": "whole mask, one byte a number",
        "peer": whole,
        "ratio": None if whole is None else whole / ours,
        "limit": None,
        "fraction_of_limit": None,
    }


def measured(kind: str, tokens: int) -> int:
    """Bytes by which such a mask lets a fresh process grow."""
    command = [sys.executable, __file__, "--allocate", kind, "--tokens", str(tokens)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def allocate(kind: str, tokens: int) -> int:
    # What torch takes at first use is not the mask's.
    torch.ones(64, 64, dtype=torch.int8).triu(1).triu_(1).count_nonzero()
    before = occupied()
    if kind == "triangle":
        mask = ascend.compressed_mask(torch.device("cpu"))
    else:
        mask = torch.ones(tokens, tokens, dtype=torch.int8).triu_(1)
    assert mask.count_nonzero() == len(mask) * (len(mask) - 1) // 2
    return occupied() - before


def occupied() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    sys.exit(main())
