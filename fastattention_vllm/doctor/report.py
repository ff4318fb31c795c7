"""Everything together: facts, findings by area, and both as text or JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fastattention_vllm.doctor import hardware, kernels, links, memory, software
from fastattention_vllm.doctor.findings import Finding

WIDTH = 80
LEVELS = ("OK", "warning", "problem")
INDENT = " " * 11


@dataclass(frozen=True)
class Facts:
    """What was probed. The rest of this package's doctor is pure functions of it."""

    hardware: hardware.Hardware
    software: software.Software
    kernels: kernels.Kernels
    memory: memory.Memory
    links: links.Links


def probe(tell: Callable[[str, list[Finding]], None] = lambda area, found: None) -> Facts:
    """``tell`` is called with the name and the findings of each area as soon as they are known."""
    here = hardware.probe()
    tell("Hardware", hardware.findings(here))
    packages = software.probe()
    tell("Software", software.findings(packages, here))
    built = kernels.probe()
    tell("Kernels", kernels.findings(built, here, packages))
    measured = memory.probe()
    tell("Host memory", memory.findings(measured))
    copied = links.probe(here)
    tell("Links", links.findings(copied))
    return Facts(here, packages, built, measured, copied)


Report = Mapping[str, list[Finding]]
"""Findings by area."""


def findings(facts: Facts) -> Report:
    return {
        "Hardware": hardware.findings(facts.hardware),
        "Software": software.findings(facts.software, facts.hardware),
        "Kernels": kernels.findings(facts.kernels, facts.hardware, facts.software),
        "Host memory": memory.findings(facts.memory),
        "Links": links.findings(facts.links),
    }


def counts(report: Report) -> dict[str, int]:
    every: list[str] = [finding.level for area in report.values() for finding in area]
    return {level: every.count(level) for level in LEVELS}


def as_text(report: Report) -> Iterator[str]:
    """Lines of at most 80 columns, but for commands that are longer: those stay whole, to be copied."""
    for area, found in report.items():
        yield from area_as_text(area, found)
    yield verdict(report)


def area_as_text(area: str, found: list[Finding]) -> Iterator[str]:
    if not found:
        return
    yield area
    for finding in found:
        yield from _wrapped(f"  {finding.level:<8} ", f"{finding.subject}: {finding.text}")
        if finding.fix:
            yield from _wrapped(f"{INDENT}-> ", finding.fix)
        if finding.command:
            yield f"{INDENT}   {finding.command}"
    yield ""


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )


def verdict(report: Report) -> str:
    number = counts(report)
    parts = [f"{number[level]} {level}{'' if number[level] == 1 else 's'}" for level in ("problem", "warning")]
    return f"{' and '.join(parts)}." if number["problem"] or number["warning"] else "No problems."


def as_json(facts: Facts, report: Report) -> str:
    """The findings by area, how many there are of each level, and the facts that they follow from."""
    content: dict[str, Any] = {
        "findings": {area: [asdict(finding) for finding in found] for area, found in report.items()},
        "counts": counts(report),
        "facts": asdict(facts),
    }
    return json.dumps(content, indent=2, default=sorted)
