"""Whole decode steps as CUDA graphs, host layers included: what vLLM asks of their metadata builder."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from fastattention_vllm.integration import compat, drafter
from fastattention_vllm.integration.cuda import graph_steps
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.host_layers.layers import HostLayers
from fastattention_vllm.integration.host_layers.metadata import HostLayerMixin, HostMetadata, HostMetadataBuilder
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.tiling.attention_rows import one_causality
from fastattention_vllm.placement import cuda_bell
from fastattention_vllm.placement.cuda_bell import CudaBell
from fastattention_vllm.placement.graph_calls import GraphBatch, GraphCalls
from fastattention_vllm.placement.link import Link
from fastattention_vllm.placement.pinning import Pinning
from fastattention_vllm.placement.step import MAX_CPU_TOKENS

logger = init_logger("vllm.fastattention")


def graph_calls(vllm_config: Any, link: Link, pinning: Pinning, cpu: int, device: Any = None) -> GraphCalls | None:
    """What host layers need inside graphs, or None if there are to be none, which the log explains.

    ``device``: the kernels of the device's part of host layers.
    """
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is None or not mode.has_full_cudagraphs():
        return None
    if not compat.captures_backends_metadata(vllm_config):
        raise Refusal(
            "the second model runner of this vLLM version cannot capture host layers in CUDA graphs; set "
            "VLLM_USE_V2_MODEL_RUNNER=0, or pass --enforce-eager."
        )
    tokens = 1 + drafter.drafts_per_request(vllm_config)
    copies = options_of(vllm_config).resident_kv_gib > 0
    if tokens > MAX_CPU_TOKENS:
        bell: CudaBell | str = f"steps of {tokens} tokens per request are divided between the CPU and the GPU"
    elif copies and not hasattr(device, "run_in_graph"):
        bell = "these kernels cannot attend to the copies of resident_kv_gib in a graph"
    else:
        bell = cuda_bell.create()
        if host_layers.smallest(float(not isinstance(bell, str)))[0] == 0 and not isinstance(bell, str):
            bell = "it is impossible on another rank"
    if isinstance(bell, str):
        logger.warning("Host layers: decode steps run in pieces instead of one CUDA graph, because %s.", bell)
        return None
    try:
        return GraphCalls(link, pinning, bell, cpu, device if hasattr(device, "run_in_graph") else None, tokens)
    except (MemoryError, ValueError) as error:
        raise Refusal(f"decode graphs with host layers: {str(error).rstrip('.')}.") from error


def reserve(calls: GraphCalls, batch: GraphBatch, dtype: torch.dtype) -> None:
    """Allocate what graphs of this batch need.

    Raises:
        Refusal: there is not enough memory.
    """
    try:
        calls.reserve(batch, dtype)
    except MemoryError as error:
        raise Refusal(f"decode graphs with host layers: {str(error).rstrip('.')}.") from error


class GraphMetadataBuilder(HostMetadataBuilder):
    """For GPUs. It also passes on the device's own buffers, which a graph reads."""

    captures = False
    """Whether a batch is being built for a capture. It belongs to no request."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        found = host_layers.find(vllm_config)
        able = found is not None and found.graph_calls is not None
        return AttentionCGSupport.UNIFORM_BATCH if able else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HostMetadata:
        found = host_layers.find(self.vllm_config)
        short = common_attn_metadata.max_query_len <= 1 + drafter.drafts_per_request(self.vllm_config)
        if found and found.graph_calls and short and graph_steps.may_be_whole_step():
            found.graph_calls.thread.wake()
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            if found.graph_calls.copies and not self.captures and self.has_copies(found):
                found.place_copies(metadata)
            return metadata
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def has_copies(self, found: HostLayers) -> bool:
        """Whether layers of this block table have copies of blocks on the device."""
        copied = {host_layers.layer_name(attention) for attention in found.group.layers if attention.copies is not None}
        return not copied.isdisjoint(self.layer_names)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> HostMetadata:
        common = common_attn_metadata
        self.captures = True
        try:
            metadata: HostMetadata = super().build_for_cudagraph_capture(common)
        finally:
            self.captures = False
        metadata.graph_batch = GraphBatch(
            table=str(id(self)),
            query_start_loc=common.query_start_loc[: common.num_reqs + 1],
            seq_lens=common.seq_lens[: common.num_reqs],
            block_table=common.block_table_tensor[: common.num_reqs],
            slot_mapping=common.slot_mapping[: common.num_actual_tokens],
            causal=one_causality(common.causal),
        )
        found = host_layers.find(self.vllm_config)
        if found and found.graph_calls:
            if found.graph_calls.copies and self.has_copies(found):
                found.graph_calls.copies.table = metadata.graph_batch.table
            with found.together():  # the others would begin the capture, and wait in its sums
                reserve(found.graph_calls, metadata.graph_batch, found.dtype)
        return metadata


class GraphHostLayerMixin(HostLayerMixin):
    """:class:`HostLayerMixin` for GPUs."""

    builder = GraphMetadataBuilder
