"""The result of a soak: what counts as grown, and how it is reported.

Used by: soak.py and its parts.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass, field

from fastattention_vllm.bench import machine
from fastattention_vllm.bench import report as results
from fastattention_vllm.bench.report import Report, Row, compared
from scripts.serve import ROOT

END_S = 10
MORE_MEMORY = 0.05
MORE_BYTES = 96 << 20
"""Memory that allocators may keep, in addition to ``MORE_MEMORY`` of the total."""
MORE_THREADS = 8
"""Pools of asyncio and the tokenizer grow on demand."""
MORE_DESCRIPTORS = 4


@dataclass
class Quiet:
    """All processes of the server together, while it has no requests."""

    memory_bytes: int
    descriptors: int
    threads: int


@dataclass
class Result:
    seconds: float
    done: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    quiet: list[Quiet] = field(default_factory=list)
    end_seconds: float = 0.0
    told: int = 0


def compare(result: Result) -> None:
    before, after = result.quiet
    for what, limit in [
        ("memory_bytes", int(MORE_MEMORY * before.memory_bytes) + MORE_BYTES),
        ("descriptors", MORE_DESCRIPTORS),
        ("threads", MORE_THREADS),
    ]:
        old, new = getattr(before, what), getattr(after, what)
        if new - old > limit:
            result.failures.append(f"{what} grew from {old} to {new}; {limit} more are allowed")


def say(result: Result) -> None:
    quiet = result.quiet[-1]
    done = ", ".join(f"{number} {kind}" for kind, number in sorted(result.done.items()))
    print(
        f"{done}; {quiet.memory_bytes / 2**20:.0f} MiB, {quiet.descriptors} descriptors, {quiet.threads} threads",
        flush=True,
    )


def report(result: Result, options: argparse.Namespace, command: list[str]) -> None:
    for failure in result.failures:
        print(f"FAILED: {failure}")
    if not result.failures:
        print(
            f"Passed; the server ended {result.end_seconds:.1f} s after SIGTERM and {result.told} clients got an error."
        )
    if options.json:
        described(result, command).write(options.json)


def described(result: Result, command: list[str]) -> Report[Row]:
    import torch

    hardware = machine.hardware(len(os.sched_getaffinity(0)))
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.get_device_name()}; {hardware}"
    words = ["vllm", *(word.replace(f"{ROOT}/", "") for word in command)]
    return results.report(rows(result), hardware, command=words, **asdict(result))


def rows(result: Result) -> list[Row]:
    """Rows that compare the end of the run with its first third, and the time that stopping took."""
    case = f"soak {result.seconds:.0f} s, {sum(result.done.values())} requests"
    found = []
    if len(result.quiet) == 2:
        before, after = (asdict(quiet) for quiet in result.quiet)
        units = {"memory_bytes": "bytes", "descriptors": "descriptors", "threads": "threads"}
        found = [
            compared(
                case,
                f"serve {name}",
                unit,
                after[name],
                better="lower",
                peer_name="after the first third",
                peer=before[name],
            )
            for name, unit in units.items()
        ]
    ended = Row(case=case, metric="serve end after SIGTERM", unit="s", ours=result.end_seconds, limit=END_S)
    return [*found, ended]
