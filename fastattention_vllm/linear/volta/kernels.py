"""x times quantised weights on NVIDIA V100 (sm_70), in fp16 with fp32 sums. Equal inputs give equal bits.

Up to 16 rows are one launch that reads the weights once, from 17 on in turns of 16. Many rows are multiplied by cuBLAS,
with weights that are converted to fp16 a slice at a time. On a newer GPU, the same kernels run from their PTX for tests:
they are correct there, but slow.
"""

from __future__ import annotations

import torch

from fastattention_vllm.linear.volta.packing import PackedWeights
from fastattention_vllm.linear.weights import WeightFormat


def supports(form: WeightFormat, k: int, n: int) -> str | None:
    """Why the kernels cannot multiply by a matrix ``[k, n]`` of this format, in one sentence; ``None`` if they can.

    They need k and n in multiples of 8 and groups of a power of two times 32 (int4) or 16 (int8) of k. k need not be
    a multiple of the group size, n not of the blocks' size. ``k`` and ``n`` are those of one rank's share.
    """
    raise NotImplementedError


def load(form: WeightFormat) -> None:
    """Load the kernels for this format, which is impossible during the capture of a CUDA graph, and allocate the scratch
    memory of :func:`apply`, which all layers share. Call it once for each format when a model is loaded, on its GPU.
    ``fastattention_vllm.attention.volta.kernels.choose`` decides whether machine code or PTX runs.

    Raises:
        ImageError: the kernels are not built, or do not match this code.
        DriverError: the driver cannot load them.
    """
    raise NotImplementedError


def apply(x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weights + bias``, by one operator that torch.compile and CUDA graphs can contain.

    On the CPU this is :func:`~.reference.product`, for tests only.

    Args:
        x: fp16 ``[..., k]``. It is copied if its last dimension is not contiguous or rows are not 16 bytes aligned.
        weights: on the same device.
        bias: fp16 ``[n]`` on the same device.

    Returns:
        fp16 ``[..., n]``, contiguous.

    Raises:
        ValueError: a dtype, shape or device is wrong. One sentence.
    """
    raise NotImplementedError
