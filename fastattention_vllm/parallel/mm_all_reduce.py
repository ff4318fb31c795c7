"""torch_npu's ``npu_mm_all_reduce_base``: a row-parallel layer's matmul and all-reduce in one call.

It cuts the rows itself, by CANN's estimates of both times. Not yet run on hardware. The limits are those of torch_npu's
API reference for the Atlas A2 (910B); ``tests/ascend/mm_all_reduce.py`` restates them independently.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastattention_vllm.parallel.tiled_linear import Linear

NAME = "npu_mm_all_reduce_base"
RANKS = (2, 4, 8)
DTYPES = (torch.float16, torch.bfloat16)


def why_not(dtype: torch.dtype, ranks: int, one_machine: bool) -> str:
    """Why the call cannot be made, in a few words; empty if it can.

    Args:
        one_machine: all ranks are NPUs of one, whose links reach each other.
    """
    if dtype not in DTYPES:
        return f"it supports float16 and bfloat16, not {dtype}"
    if ranks not in RANKS:
        return f"it needs 2, 4 or 8 NPUs, not {ranks}"
    return "" if one_machine else "it needs all NPUs in one machine"


def layer(communicator: Callable[[], str]) -> Linear:
    """Input, weight and this rank's bias (None on all ranks but one) to the sum over the ranks.

    Args:
        communicator: HCCL's name for the ranks' group; asked each time, as sleeping and waking change it.
    """
    import torch_npu

    def multiply_and_sum(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        summed: torch.Tensor = torch_npu.npu_mm_all_reduce_base(x, weight.t(), communicator(), bias=bias)
        return summed

    return multiply_and_sum
