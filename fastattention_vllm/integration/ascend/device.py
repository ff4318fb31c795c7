"""The runtime that host layers use on an Ascend NPU with vllm-ascend 0.23. Not yet run on hardware."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm_ascend.ascend_config import get_ascend_config

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.host_layers.accelerator import AcceleratorRuntime
from fastattention_vllm.integration.host_layers.metadata import HostMetadataBuilder
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.placement import npu
from fastattention_vllm.placement.link import Link
from fastattention_vllm.placement.pinning import NpuPinning
from fastattention_vllm.placement.step import Batch

logger = init_logger("vllm.fastattention")

PAGE = 128
"""Tokens per block in vllm-ascend's block tables, independent of the cache's block size."""


class AscendHostMetadataBuilder(HostMetadataBuilder):
    """vllm-ascend's metadata for host layers."""

    def starts(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Drop the padding of parallel layers: an additional request at the end without length and blocks."""
        starts = super().starts(common)
        return starts[: int((starts[:-1] < common.num_actual_tokens).sum()) + 1]

    def page(self) -> int:
        return PAGE

    def batch(self, starts: Any, lengths: Any, table: Any, host_slots: Any, slots: Any, causal: bool) -> Batch:
        host_slots = host_slots.long()
        return Batch(starts, lengths, table, host_slots, host_slots, causal)


class AscendRuntime(AcceleratorRuntime):
    """One NPU."""

    called = "NPU"
    pin = NpuPinning()

    def __init__(self, vllm_config: Any, host_backend: type[Any]) -> None:
        runtime: Any = torch.get_device_module("npu")
        device = torch.device("npu", runtime.current_device())
        super().__init__(vllm_config, host_backend, npu, "torch_npu's fused operator", device)

    def settle_block_size(self) -> None:
        """Does nothing: vllm-ascend has already set the block size."""

    def prepare(self) -> None:
        mode = self.vllm_config.compilation_config.cudagraph_mode
        if mode.has_full_cudagraphs() and not mode.requires_piecewise_compilation():
            raise Refusal(
                f"cudagraph_mode {mode.name} captures whole steps, which is impossible with host layers because "
                'they wait for the CPU; pass --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\' or '
                "--enforce-eager, or set host_kv_layers to 0."
            )
        stored = options_of(self.vllm_config).host_kv_dtype
        if stored != "auto":
            raise Refusal(
                f"host_kv_dtype is {stored}, but on an NPU host layers store the model's dtype only; remove "
                "host_kv_dtype, or set host_kv_layers to 0."
            )
        block = self.vllm_config.cache_config.block_size
        if block != PAGE:
            raise Refusal(f"host layers on an NPU need blocks of {PAGE} tokens, not {block}; pass --block-size {PAGE}.")
        if get_ascend_config().enable_cpu_binding:
            get_ascend_config().enable_cpu_binding = False
            logger.info_once(
                "vllm-ascend's enable_cpu_binding was turned off, because it would move all attention threads to the "
                "same CPUs."
            )
        super().prepare()

    def extend_worker(self) -> None:
        from vllm_ascend.worker.worker import NPUWorker  # already imported here, and expensive to import elsewhere

        compat.check_worker_class(self.vllm_config, NPUWorker, compat.HOST_LAYERS_OFF)
        compat.extend_worker(NPUWorker, host_layers.find)

    def link(self) -> Link:
        return npu.NpuLink(self.device)
