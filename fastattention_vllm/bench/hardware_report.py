"""The one form of reports by owners of a V100, a T4 or a 910B: whether the numbers are right, then how fast it is.

Used by: `fastattention bench volta --report` and benchmarks/ascend_910b.py. docs/hardware-reports.md explains the form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.bench.report import Report, Row, today

SEND = "Please attach it to an issue; the form is called 'Hardware report'."


class Check(BaseModel):
    """One kind of step, compared with float64."""

    model_config = ConfigDict(extra="forbid")

    case: str
    error: float | None
    """Largest difference. None if the step failed, or if the difference is not a number."""
    allowed: float
    right: bool
    note: str = ""
    """The message of a step that failed."""


class HardwareReport(Report[Row]):
    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    device: str
    """The device's name, as its driver reports it."""
    hardware: dict[str, str]
    numbers: list[Check]


def hardware_report(
    device: str,
    hardware: dict[str, str],
    versions: dict[str, str],
    numbers: Sequence[Check],
    rows: Sequence[Row],
) -> HardwareReport:
    plain = [Row.model_validate(row.model_dump()) for row in rows]
    return HardwareReport(
        device=device, hardware=hardware, versions=versions, date=today(), numbers=list(numbers), rows=plain
    )


def reference(problem: AttentionProblem) -> torch.Tensor:
    """The answer in float64, on the CPU. K and V are in pages; windows are those of causal attention."""
    outs = []
    assert problem.block_table is not None
    group, page = problem.num_heads // problem.num_kv_heads, problem.key.shape[1]
    for sequence, length in enumerate(problem.seq_lens.tolist()):
        begin, end = problem.query_start_loc[sequence : sequence + 2].tolist()
        pages = problem.block_table[sequence].cpu()[: -(-length // page)].long()
        key, value = (
            (cache.cpu()[pages].flatten(0, 1)[:length].double() * factor).repeat_interleave(group, 1)
            for cache, factor in ((problem.key, problem.key_scale), (problem.value, problem.value_scale))
        )
        score = torch.einsum("qhd,khd->hqk", problem.query[begin:end].cpu().double(), key) * problem.scale
        own, position = torch.arange(length - (end - begin), length)[:, None], torch.arange(length)
        if problem.softcap > 0:
            score = problem.softcap * torch.tanh(score / problem.softcap)
        if problem.alibi_slopes is not None:
            score -= problem.alibi_slopes.cpu().double()[:, None, None] * (own - position).abs()
        hidden = position > own
        if problem.window[0] >= 0:
            hidden |= position < own - problem.window[0]
        score = score.masked_fill(hidden, -torch.inf)
        if problem.sinks is not None:
            sink = problem.sinks.cpu().double()[:, None, None].expand(-1, end - begin, 1)
            score = torch.cat((score, sink), 2)
        outs.append(torch.einsum("hqk,khd->qhd", score.softmax(-1)[..., :length], value))
    return torch.cat(outs)
