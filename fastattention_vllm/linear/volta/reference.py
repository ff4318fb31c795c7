"""The kernels' results in plain torch, for CPU tensors in tests. Slow: each product converts the whole matrix."""

from __future__ import annotations

import torch

from fastattention_vllm.linear.volta.packing import PackedWeights, unpack
from fastattention_vllm.linear.weights import BLOCK, MIDDLE, PER_WORD


def dequantised(weights: PackedWeights) -> torch.Tensor:
    """fp32 ``[k, n]``. Weights of integers are rounded to fp16, as the kernels do."""
    form, matrix = weights.format, unpack(weights)
    size = {"group": form.group_size, "block": BLOCK}.get(form.scales, weights.k)
    group = torch.arange(weights.k, device=matrix.numbers.device) // size
    scales = matrix.scales[group]
    if form.kind == "fp8_e4m3":
        width = {"block": BLOCK, "tensor": weights.n}.get(form.scales, 1)
        return matrix.numbers.float() * scales.repeat_interleave(width, dim=1)[:, : weights.n]
    per_word = PER_WORD[form.kind]
    bits = 32 // per_word
    numbers = torch.stack([matrix.numbers >> bits * place & (1 << bits) - 1 for place in range(per_word)], dim=1)
    zeros = MIDDLE[form.kind] if matrix.zeros is None else matrix.zeros[group]
    return ((numbers.view(weights.k, weights.n) - zeros).half() * scales).float()


def product(x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` fp16 ``[rows, k]`` times the weights, plus ``bias`` fp16 ``[n]``: fp16 ``[rows, n]``, summed in fp32."""
    result = x.float() @ dequantised(weights)
    return (result if bias is None else result + bias.float()).half()
