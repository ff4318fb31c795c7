"""An NVIDIA GPU beside the host: what host layers need of it, whichever kernels it runs."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.host_layers.accelerator import AcceleratorRuntime
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.placement.host_attention import Device
from fastattention_vllm.placement.link import CudaLink, Link
from fastattention_vllm.placement.pinning import CudaPinning

HOST_BLOCK = 128
"""Tokens. 16 of them give the CPU 0.9 of that rate (benchmarks/NOTES.md)."""


def preferred_block_size(otherwise: int) -> int:
    """Tokens of a block, where --block-size does not say: host memory is read faster in larger pieces."""
    none = options_of(get_current_vllm_config()).host_kv_layers in (0, [])
    return otherwise if none else max(otherwise, HOST_BLOCK)


class CudaRuntime(AcceleratorRuntime):
    """One GPU beside the host."""

    pin = CudaPinning()

    def __init__(self, vllm_config: Any, host_backend: type[Any], kernels: Device, named: str) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(vllm_config, host_backend, kernels, named, device)

    def settle_block_size(self) -> None:
        cache = self.vllm_config.cache_config
        if not getattr(cache, "user_specified_block_size", True):  # versions without it have asked already
            cache.block_size = preferred_block_size(cache.block_size)

    def extend_worker(self) -> None:
        compat.extend_gpu_worker(host_layers.find)

    def link(self) -> Link:
        return CudaLink(self.device)
