"""torch_npu's ``npu_mm_all_reduce_base`` on CPUs over gloo, written from its API reference for the Atlas A2.

Calls that the reference excludes raise an AssertionError here. The limits are deliberately restated instead of being
imported from ``fastattention_vllm.parallel.mm_all_reduce``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

groups: dict[str, dist.ProcessGroup] = {}
"""Process groups by their HCCL name."""
calls: list[tuple[int, bool]] = []
"""One entry per call: number of rows, and whether there was a bias. Tests clear it."""


def npu_mm_all_reduce_base(
    x1: torch.Tensor,
    x2: torch.Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
    comm_turn: int = 0,
    **others: Any,
) -> torch.Tensor:
    calls.append((len(x1), bias is not None))
    used = {name: given for name, given in others.items() if given not in (None, 0)}
    assert not used, f"not supported by this stand-in: {used}"
    assert reduce_op == "sum"
    assert comm_turn == 0
    group = groups[hcom]
    assert dist.get_world_size(group) in (1, 2, 4, 8)
    assert x1.dtype in (torch.float16, torch.bfloat16)
    assert x1.dtype == x2.dtype
    assert x1.dim() in (2, 3)
    assert x2.dim() == 2
    assert x1.is_contiguous(), "x1 must not be transposed"
    assert x1.shape[-1] == x2.shape[0]
    assert x1.numel()
    assert x2.numel()
    if bias is not None:
        assert bias.dtype == x1.dtype
        assert bias.shape == x2.shape[1:]
    out = torch.nn.functional.linear(x1, x2.t(), bias)
    dist.all_reduce(out, group=group)
    return out
