"""Linear layers on weights in rows, as checkpoints store them: ``kernels/cpu/src/linear.h``."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int32, c_int64, c_void_p

import torch

from fastattention_vllm.attention.cpu.library import check, library

FEW_TOKENS = 16
"""The kernels stream the weight for up to about this many tokens, and transpose it by parts for more."""

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _Linear(ctypes.Structure):
    """``fa_linear`` of ``fastattention_cpu.h``, field by field."""

    _fields_ = [
        ("num_tokens", c_int64),
        ("in_features", c_int32),
        ("out_features", c_int32),
        ("dtype", c_int32),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("x_stride", c_int64),
        ("weight_stride", c_int64),
        ("y_stride", c_int64),
    ]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` with fp32 products and sums, as ``torch.nn.functional.linear``.

    Args:
        x: ``[..., in_features]``, fp32, fp16 or bf16.
        weight: ``[out_features, in_features]`` of the same dtype. Its rows are contiguous.
        bias: ``[out_features]`` of the same dtype.

    Returns ``[..., out_features]`` of the same dtype. Raises ``ValueError`` for tensors that do not match.
    """
    # A decoding step calls this more than a hundred times, so what can be wrong is checked at once.
    dtype = _DTYPES.get(x.dtype)
    if (
        dtype is None
        or weight.dtype is not x.dtype
        or not (x.is_cpu and weight.is_cpu)
        or weight.dim() != 2
        or x.dim() == 0
        or x.shape[-1] != weight.shape[1]
        or weight.stride(1) != 1
        or not weight.numel()
    ):
        raise _refusal(x, weight)
    out_features, in_features = weight.shape
    if bias is not None:
        if bias.dtype is not x.dtype or not bias.is_cpu or bias.shape != (out_features,):
            raise ValueError(
                f"bias must be [{out_features}] {x.dtype} on cpu, not {list(bias.shape)} {bias.dtype} on {bias.device}."
            )
        bias = bias.contiguous()
    y = x.new_empty(*x.shape[:-1], out_features)
    rows = x if x.dim() == 2 else x.reshape(x.numel() // in_features, in_features)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    arguments = _Linear(
        rows.shape[0],
        in_features,
        out_features,
        dtype,
        rows.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        rows.stride(0),
        weight.stride(0),
        out_features,
    )
    check(_function()(arguments))
    return y


def _refusal(x: torch.Tensor, weight: torch.Tensor) -> ValueError:
    if x.dtype not in _DTYPES or weight.dtype != x.dtype or not (x.is_cpu and weight.is_cpu):
        return ValueError(
            "x and weight must be on cpu and have the same dtype, float32, float16 or bfloat16, not "
            f"{x.dtype} on {x.device} and {weight.dtype} on {weight.device}."
        )
    return ValueError(
        "x must be [..., in_features] and weight [out_features, in_features] with contiguous rows, both sizes at "
        f"least 1, not {list(x.shape)} and {list(weight.shape)} with strides {list(weight.stride())}."
    )


@functools.cache
def _function() -> ctypes._NamedFuncPointer:
    function = library().fa_cpu_linear
    function.argtypes = [ctypes.POINTER(_Linear)]
    return function
