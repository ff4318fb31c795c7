"""Rotary position embedding in place: ``kernels/cpu/src/rotary.h``."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int32, c_int64, c_void_p

import torch

from fastattention_vllm.attention.cpu.library import check, library

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _Rotary(ctypes.Structure):
    """``fa_rotary`` of ``fastattention_cpu.h``, field by field."""

    _fields_ = [
        ("num_tokens", c_int64),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_size", c_int32),
        ("rotary_size", c_int32),
        ("first_dimension", c_int32),
        ("inverse", c_int32),
        ("dtype", c_int32),
        ("cache_dtype", c_int32),
        ("num_positions", c_int64),
        ("positions", c_void_p),
        ("cos_sin", c_void_p),
        ("query", c_void_p),
        ("key", c_void_p),
        ("cos_sin_stride", c_int64),
        ("query_stride", c_int64),
        ("key_stride", c_int64),
    ]


def rotate(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin: torch.Tensor,
    first_dimension: int = 0,
    *,
    inverse: bool = False,
) -> None:
    """Rotate the heads of ``query`` and ``key`` in place, in fp32 (Su et al., RoFormer, 2021).

    Args:
        positions: ``[tokens]`` int64, each a row of ``cos_sin``.
        query, key: ``[tokens, heads * head_size]``, fp32, fp16 or bf16. A token's heads are contiguous.
        cos_sin: ``[positions, rotary size]`` in one of these dtypes: the cosines, then the sines. The first and the
            second half of a head's rotary dimensions belong together.
        first_dimension: of the rotary ones within a head.
        inverse: rotate back.

    Raises ``ValueError`` for tensors that do not match, and for positions that ``cos_sin`` has not.
    """
    tokens = positions.numel()
    for states in (query,) if key is None else (query, key):
        if states.dtype is not query.dtype or states.dim() != 2 or states.shape[0] != tokens or states.stride(1) != 1:
            raise ValueError(
                f"query and key must be [{tokens}, heads * {head_size}] of one dtype with contiguous rows, not "
                f"{list(states.shape)} {states.dtype} with strides {list(states.stride())}."
            )
        if states.shape[1] % head_size:
            raise ValueError(f"{states.shape[1]} is not a multiple of the head size, {head_size}.")
    if query.dtype not in _DTYPES or cos_sin.dtype not in _DTYPES or cos_sin.dim() != 2 or cos_sin.stride(1) != 1:
        raise ValueError(
            "query, key and cos_sin must be float32, float16 or bfloat16, and cos_sin [positions, rotary size] with "
            f"contiguous rows, not {query.dtype} and {list(cos_sin.shape)} {cos_sin.dtype}."
        )
    on_cpu = query.is_cpu and cos_sin.is_cpu and positions.is_cpu and (key is None or key.is_cpu)
    if not on_cpu or positions.dtype is not torch.int64:
        raise ValueError(
            f"positions must be int64 and all tensors on cpu, not {positions.dtype} on {positions.device}."
        )
    positions = positions.contiguous()
    arguments = _Rotary(
        tokens,
        query.shape[1] // head_size,
        0 if key is None else key.shape[1] // head_size,
        head_size,
        cos_sin.shape[1],
        first_dimension,
        inverse,
        _DTYPES[query.dtype],
        _DTYPES[cos_sin.dtype],
        cos_sin.shape[0],
        positions.data_ptr(),
        cos_sin.data_ptr(),
        query.data_ptr(),
        None if key is None else key.data_ptr(),
        cos_sin.stride(0),
        query.stride(0),
        0 if key is None else key.stride(0),
    )
    check(_function()(arguments))


@functools.cache
def _function() -> ctypes._NamedFuncPointer:
    function = library().fa_cpu_rotate
    function.argtypes = [ctypes.POINTER(_Rotary)]
    return function
