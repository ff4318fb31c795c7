"""torch_npu's ``npu_mm_all_reduce_base``: matmul and all-reduce of a row-parallel layer in one call.

It splits the rows itself, by CANN's estimates of both times. Not yet run on hardware. The limits are those of
torch_npu's API reference for the Atlas A2 (910B); ``tests/ascend/mm_all_reduce.py`` states them independently.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastattention_vllm.parallel.tiled_linear import Linear

NAME = "npu_mm_all_reduce_base"
RANKS = (2, 4, 8)
DTYPES = (torch.float16, torch.bfloat16)


def why_not(dtype: torch.dtype, ranks: int, one_machine: bool) -> str:
    """Why the call is not possible, in a few words; empty if it is.

    Args:
        one_machine: whether all ranks are NPUs of one machine, which are linked to each other.
    """
    if dtype not in DTYPES:
        return f"it supports float16 and bfloat16, not {dtype}"
    if ranks not in RANKS:
        return f"it needs 2, 4 or 8 NPUs, not {ranks}"
    return "" if one_machine else "it needs all NPUs in one machine"


def layer(communicator: Callable[[], str]) -> Linear:
    """A function of input, weight and this rank's bias (None on all ranks but one) that returns the sum over the ranks.

    Args:
        communicator: returns HCCL's name of the group. It is called each time, because sleep mode changes the name.
    """
    import torch_npu

    def multiply_and_sum(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        summed: torch.Tensor = torch_npu.npu_mm_all_reduce_base(x, weight.t(), communicator(), bias=bias)
        return summed

    return multiply_and_sum
