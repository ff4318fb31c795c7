"""Limits the number of a GPU's multiprocessors that cuBLAS uses."""

from __future__ import annotations

import ctypes
import functools

import torch


def leave_free(number: int, device: torch.device) -> None:
    """Make this thread's following matmuls leave ``number`` of the GPU's multiprocessors free.

    No effect on a CPU. cuBLAS uses the number as a target when it chooses kernels, not as a strict limit.
    """
    if device.type != "cuda":
        return
    all_of_them = torch.cuda.get_device_properties(device).multi_processor_count
    target = max(1, all_of_them - number) if number else 0  # 0: cuBLAS's own default
    status = _cublas().cublasSetSmCountTarget(ctypes.c_void_p(torch.cuda.current_blas_handle()), target)
    if status:
        raise RuntimeError(f"cublasSetSmCountTarget({target}) of {all_of_them} multiprocessors failed: {status}.")


@functools.cache
def _cublas() -> ctypes.CDLL:
    """The cuBLAS library that torch has loaded."""
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libcublas.so.{torch.version.cuda.split('.')[0]}")
