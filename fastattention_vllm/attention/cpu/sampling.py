"""Sampling a token from each row of logits, in one pass and on all threads.

``kernels/cpu/src/sampling.h`` has the method: the largest of logits plus Gumbel noise (Gumbel, 1954), whose noise is a
function of a row's seed and the token.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int32, c_int64, c_void_p

import torch

from fastattention_vllm.attention.cpu.library import check, library

_CPU = torch.device("cpu")


class _Sampling(ctypes.Structure):
    """``fa_sampling`` of ``fastattention_cpu.h``, field by field."""

    _fields_ = [
        ("num_rows", c_int64),
        ("vocabulary", c_int32),
        ("logits", c_void_p),
        ("row_stride", c_int64),
        ("seeds", c_void_p),
        ("tokens", c_void_p),
    ]


def sample(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Draw a token from the softmax of each row. It depends on the row's logits and seed alone.

    Args:
        logits: ``[rows, vocabulary]`` fp32. A row's last dimension is contiguous. -inf excludes a token. A row with NaN
            gives the token of the first one, and a row of -inf gives 0.
        seeds: ``[rows]`` int64.

    Returns ``[rows]`` int64. Raises ``ValueError`` for tensors that do not match.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.device != _CPU or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be [rows, vocabulary] float32 on cpu with contiguous rows, not {list(logits.shape)} "
            f"{logits.dtype} on {logits.device} with strides {list(logits.stride())}."
        )
    rows, vocabulary = logits.shape
    if seeds.shape != (rows,) or seeds.dtype != torch.int64 or seeds.device != _CPU:
        raise ValueError(
            f"seeds must be [{rows}] int64 on cpu, not {list(seeds.shape)} {seeds.dtype} on {seeds.device}."
        )
    seeds, tokens = seeds.contiguous(), torch.empty(rows, dtype=torch.int64)
    arguments = _Sampling(
        num_rows=rows,
        vocabulary=vocabulary,
        logits=logits.data_ptr(),
        row_stride=logits.stride(0),
        seeds=seeds.data_ptr(),
        tokens=tokens.data_ptr(),
    )
    check(_functions().fa_cpu_sample(arguments))
    return tokens


@functools.cache
def _functions() -> ctypes.CDLL:
    loaded = library()
    loaded.fa_cpu_sample.argtypes = [ctypes.POINTER(_Sampling)]
    return loaded
