"""The runtime that host layers use on an NVIDIA GPU, for all of its kernels."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config

from fastattention_vllm.integration import compat, drafter
from fastattention_vllm.integration.cuda import graph_steps
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.host_layers.accelerator import AcceleratorRuntime
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.placement.budget import HOST_BLOCK
from fastattention_vllm.placement.graph_calls import GraphCalls
from fastattention_vllm.placement.host_attention import Device
from fastattention_vllm.placement.link import CudaLink, Link
from fastattention_vllm.placement.pinning import CudaPinning


def preferred_block_size(otherwise: int) -> int:
    """Tokens per block if --block-size is not set. Host memory is read faster in larger blocks."""
    none = options_of(get_current_vllm_config()).host_kv_layers in (0, [])
    return otherwise if none else max(otherwise, HOST_BLOCK)


class CudaRuntime(AcceleratorRuntime):
    """One NVIDIA GPU."""

    pin = CudaPinning()
    beside_states = True
    keeps_copies = True

    def __init__(self, vllm_config: Any, host_backend: type[Any], kernels: Device, named: str) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(vllm_config, host_backend, kernels, named, device)

    def settle_block_size(self) -> None:
        cache = self.vllm_config.cache_config
        if not getattr(cache, "user_specified_block_size", True):  # versions without it asked the backend earlier
            cache.block_size = preferred_block_size(cache.block_size)
        if self.vllm_config.model_config.is_hybrid:
            compat.settle_hybrid_block_size(self.vllm_config, self.host_backend)

    def prepare(self) -> None:
        compat.keep_block_size(self.vllm_config)
        super().prepare()

    def extend_worker(self) -> None:
        compat.extend_gpu_worker(self.vllm_config, host_layers.find)
        graph_steps.choose_whole_steps(host_layers.find)
        if drafter.finds_drafts(self.vllm_config):
            graph_steps.fill_ngram_drafts(host_layers.find)

    def graph_calls(self, link: Link) -> GraphCalls | None:
        from fastattention_vllm.integration.cuda import decode_graph

        return decode_graph.graph_calls(self.vllm_config, link, self.pin, self.first_cpu, self.kernels())

    def link(self) -> Link:
        return CudaLink(self.device)
