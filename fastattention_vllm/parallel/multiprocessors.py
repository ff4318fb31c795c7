"""How many of a GPU's multiprocessors cuBLAS may fill."""

from __future__ import annotations

import ctypes
import functools

import torch


def leave_free(number: int, device: torch.device) -> None:
    """Let the matmuls that this thread orders from now on fill all but ``number`` of the GPU's multiprocessors.

    Nothing on a CPU. cuBLAS takes it as a target for the choice of its kernels, not as a limit.
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
    """The one that torch has loaded."""
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libcublas.so.{torch.version.cuda.split('.')[0]}")
