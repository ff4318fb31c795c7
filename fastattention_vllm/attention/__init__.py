"""Attention: one description of the problem, and the kernel families that compute it."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def kernels_for(device: torch.device) -> ModuleType:
    """The kernel family (a module with ``can_run`` and ``run``) for ``device``.

    There are kernels for CPUs, NVIDIA GPUs below compute capability 8.0 (the Volta kernels), newer NVIDIA GPUs (vLLM's
    FlashAttention), and NPUs.

    Raises:
        ValueError: there are no kernels for this device.
    """
    if device.type == "cpu":
        from fastattention_vllm.attention.cpu import kernels as cpu

        return cpu
    if device.type == "cuda":
        import torch

        from fastattention_vllm.attention import flash
        from fastattention_vllm.attention.volta import kernels as volta

        return flash if torch.cuda.get_device_capability(device) >= (8, 0) else volta
    if device.type == "npu":
        from fastattention_vllm.attention import ascend

        return ascend
    raise ValueError(f"No attention kernels for device {device}; available: cpu, cuda, npu.")
