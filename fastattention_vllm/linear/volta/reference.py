"""The kernels' results in plain torch, for CPU tensors in tests. Slow: the whole matrix is converted for each product."""

from __future__ import annotations

import torch

from fastattention_vllm.linear.volta.packing import PackedWeights


def dequantised(weights: PackedWeights) -> torch.Tensor:
    """fp32 ``[k, n]``. Weights of integers are rounded to fp16, as the kernels do."""
    raise NotImplementedError


def product(x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` fp16 ``[rows, k]`` times the weights, plus ``bias`` fp16 ``[n]``: fp16 ``[rows, n]``, summed in fp32."""
    raise NotImplementedError
