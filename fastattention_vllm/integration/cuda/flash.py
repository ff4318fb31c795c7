"""The attention backend for NVIDIA GPUs of compute capability 8.0 and newer: vLLM's FLASH_ATTN plus host layers.

Device layers run vLLM's code unchanged, so a step without host layers has no additional work.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from fastattention_vllm.attention import flash
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.integration import compat
from fastattention_vllm.integration.claims import DeviceBuildersOwn, DeviceImplsOwn, DevicesOwn
from fastattention_vllm.integration.cuda.decode_graph import GraphHostLayerMixin
from fastattention_vllm.integration.cuda.device import CudaRuntime, preferred_block_size
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.tiling import row_parallel, small_sums
from fastattention_vllm.integration.tiling.attention_rows import can_be_cut, row_blocks


class FastAttentionFlashBackend(DevicesOwn, FlashAttentionBackend):
    """``--attention-backend fastattention`` on these GPUs."""

    @staticmethod
    def get_name() -> str:
        return compat.BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[FastAttentionFlashImpl]:
        return FastAttentionFlashImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return BlockedMetadataBuilder

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return preferred_block_size(super().get_preferred_block_size(default_block_size))


class FastAttentionFlashImpl(DeviceImplsOwn, FlashAttentionImpl):
    """One attention layer. It becomes a host layer if the plan says so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        left = self.sliding_window[0]
        self.host_window = None if left < 0 else left

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is None:  # vLLM up to 0.23 loads weights again without one; what follows is done by then
            return
        if options_of(vllm_config).tiling_all_reduce != "off":
            compat.before_gpu_profiling(row_parallel.enable_tiling)
        small_sums.set_up(vllm_config)
        self.kernels_name = f"FlashAttention {flash.version(self.head_size)}"
        host_layers.set_up(vllm_config, CudaRuntime(vllm_config, HostLayerFlashBackend, flash, self.kernels_name))

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *more: Any,
        **named: Any,
    ) -> torch.Tensor:
        cut = getattr(attn_metadata, "row_blocks", None)
        blocks = row_parallel.attention_blocks()
        if cut is None or blocks is None:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *more, **named)
            return output
        blocks.ready.begin(output)
        for block in cut:
            rows = slice(block.begin, block.end)
            part = block.of(attn_metadata)
            super().forward(layer, query[rows], key, value, kv_cache, part, output[rows], *more, **named)
            blocks.ready.mark(output, block.end)
        return output

    def problem(self, layer: Any, **parts: Any) -> AttentionProblem:
        """A problem with this layer's scale, mask and so on. ``parts`` are the batch's tensors, or override fields."""
        sinks = self.sinks
        on_host = parts["query"].device.type == "cpu"
        own = {
            "scale": self.scale,
            "window": (self.sliding_window[0], -1),
            "softcap": float(self.logits_soft_cap or 0.0),
            "sinks": None if sinks is None else sinks.detach().float().to("cpu" if on_host else sinks.device),
        }
        return AttentionProblem(**(own | parts))

    def scales(self, layer: Any) -> tuple[float, float]:
        return (1.0, 1.0)

    def merges(self) -> bool:
        return True

    def cache_dtype(self, kv_cache: torch.Tensor) -> torch.dtype:
        return kv_cache.dtype

    def why_not_on_host(self) -> str | None:
        """The feature that keeps this layer on the device, or None."""
        if self.alibi_slopes is not None:
            return "ALiBi position bias"
        if self.kv_cache_dtype not in ("auto", "float16", "bfloat16"):
            return f"--kv-cache-dtype {self.kv_cache_dtype}"
        return None if self.attn_type == AttentionType.DECODER else f"attention type {self.attn_type}"


class BlockedMetadataBuilder(DeviceBuildersOwn, FlashAttentionBackend.get_builder_cls()):  # type: ignore[misc]
    """vLLM's builder. With ``tiling_full_form``, it also creates the blocks of a step, once for all layers."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        compat.settle_scheduled_window(self, FlashAttentionImpl)
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        blocks = row_parallel.attention_blocks()
        if blocks is None or not can_be_cut(metadata):
            return metadata
        common = common_attn_metadata
        starts_cpu = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        sizes = blocks.of(starts_cpu[-1])
        if len(sizes) > 1:
            metadata.row_blocks = row_blocks(sizes, starts_cpu, metadata.query_start_loc, metadata.seq_lens)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Build without blocks, because a replay reads vLLM's own buffers, which do not contain a block's lengths."""
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        metadata.row_blocks = None
        return metadata


class HostLayerFlashBackend(GraphHostLayerMixin, FastAttentionFlashBackend):
    """The backend for host layers on these GPUs."""
