"""The attention backend: vLLM's metadata becomes one ``AttentionProblem``, and a kernel family runs it."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)

from fastattention_vllm.attention.cpu import kernels as cpu_kernels
from fastattention_vllm.attention.cpu import layer as cpu_layer
from fastattention_vllm.attention.cpu.layer import LayerAttention, LayerWriter
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.integration import binding, compat, support
from fastattention_vllm.integration.base import Backend, Layer
from fastattention_vllm.integration.claims import BuilderClaims
from fastattention_vllm.integration.cpu.stand_ins import ops as cpu_ops
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.host_layers.device import local_rank
from fastattention_vllm.integration.host_layers.metadata import HostLayerMixin
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.tiling.attention_rows import one_causality
from fastattention_vllm.placement import cpus as topology
from fastattention_vllm.placement.host_attention import Device
from fastattention_vllm.placement.link import Link, LocalLink

logger = init_logger("vllm.fastattention")


class FastAttentionBackend(Backend):
    """``--attention-backend fastattention``: answers vLLM's questions before it builds any layer."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(support.KV_CACHE_DTYPES)

    @staticmethod
    def get_impl_cls() -> type[FastAttentionImpl]:
        return FastAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FastAttentionMetadataBuilder]:
        return FastAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return False  # vLLM calls this on GPUs only, where other backends of this package run

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= cpu_kernels.MAX_HEAD_SIZE and head_size % cpu_kernels.HEAD_SIZE_MULTIPLE == 0


@dataclass
class FastAttentionMetadata:
    """One step's batch, shared by all layers of a KV cache group. All tensors are on the CPU."""

    query_start_loc: torch.Tensor
    """``[num_reqs + 1]`` int32."""
    seq_lens: torch.Tensor
    """``[num_reqs]`` int32: KV tokens of each request, this step's included."""
    block_table: torch.Tensor
    """``[num_reqs, max_blocks]`` int32."""
    causal: bool
    slot_mapping: torch.Tensor | None = None
    """``[num_tokens]`` int64. vLLM passes it to ``do_kv_cache_update``; only upstream's backend tests read it here."""

    @functools.cached_property
    def batch(self) -> cpu_layer.Batch:
        return cpu_layer.Batch(self.query_start_loc, self.seq_lens, self.block_table, self.causal)


class FastAttentionMetadataBuilder(BuilderClaims, AttentionMetadataBuilder[Any]):
    """Turns vLLM's per-step metadata into the few tensors the kernels read."""

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        start_cpu_threads(vllm_config)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FastAttentionMetadata:
        common = common_attn_metadata
        return FastAttentionMetadata(
            query_start_loc=common.query_start_loc_cpu[: common.num_reqs + 1],
            seq_lens=common.seq_lens[: common.num_reqs],
            block_table=common.block_table_tensor[: common.num_reqs],
            causal=one_causality(common.causal),
            slot_mapping=common.slot_mapping,
        )


class HostLayerBackend(HostLayerMixin, FastAttentionBackend):
    """The backend for host layers on CPUs."""


class CpuRuntime:
    """A runtime whose "device" is the host itself. It has two pools and takes the same steps as a GPU."""

    pin = None
    host_backend = HostLayerBackend
    beside_states = True
    keeps_copies = True

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def cpus(self) -> list[int]:
        return binding.cpus_in_reach(local_rank())

    def settle_block_size(self) -> None:
        """Does nothing: the platform has already set the block size."""

    def prepare(self) -> None:
        """Does nothing: all layers use the same threads, and the worker belongs to this package."""

    def kernels(self) -> Device:
        return cpu_kernels

    def link(self) -> Link:
        return LocalLink()

    def graph_calls(self, link: Link) -> None:
        """None: there are no CUDA graphs."""

    def kv_bytes(self) -> int:
        return int(self.vllm_config.cache_config.kv_cache_memory_bytes)


def start_cpu_threads(vllm_config: Any) -> None:
    """Size the attention thread pool for this rank's CPUs, and log (once) which kernel runs."""
    from vllm.distributed.parallel_state import get_world_group

    rank = get_world_group().local_rank
    cpus = [] if binding.floats() else binding.cpus_of_rank(rank)
    local_ranks = vllm_config.parallel_config.local_world_size
    share = len(cpus) or topology.share_of_rank(rank, local_ranks)
    threads = options_of(vllm_config).cpu_threads or share
    if binding.floats_by_our_choice() or (topology.quota_is_smaller() and not cpus):
        # vLLM does this only if it binds threads. torch counts CPUs, but threads beyond a quota would be throttled, and
        # each of several ranks would have a thread on every CPU.
        cpu_ops.set_num_threads(share)
    try:
        cpu_kernels.set_num_threads(threads, cpus)
    except ValueError as error:  # the user's list is wrong; the platform's own list contains usable CPUs only
        raise Refusal(f"{error} Name other CPUs in {binding.THREADS_BIND}, or unset it.") from error
    if cpus and (bound := os.environ.get(binding.THREADS_BIND)) and bound == os.environ.get(binding.OWN_BIND):
        binding.share_with_other_servers(cpus, binding.cpus_bound_by(bound))
    logger.info_once(
        "Attention kernel: fastattention CPU, instruction set %s (usable here: %s), %s; "
        "chosen because no accelerator was found.",
        cpu_kernels.isa(),
        ", ".join(cpu_kernels.usable_isas()),
        topology.describe_pinning(threads, cpus, os.sched_getaffinity(0)),
    )


class FastAttentionImpl(Layer):
    """One attention layer: decoder attention over the KV cache, or encoder-only attention over this step's tokens."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._bound: torch.Tensor | None = None
        self._attention: LayerAttention | None = None
        self._writer: LayerWriter

    @property
    def kernels_name(self) -> str:
        return f"fastattention CPU, {cpu_kernels.isa()}"

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is None:  # vLLM up to 0.23 loads weights again without one; what follows is done by then
            return
        host_layers.set_up(vllm_config, CpuRuntime(vllm_config))

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Scatter this step's ``key``, ``value`` ``[>= num_tokens, num_kv_heads, head_size]`` into the cache."""
        if self.is_encoder:  # no cache, because every request is complete in one step
            return
        if kv_cache is not self._bound:
            self._bind(kv_cache)
        self._writer.write(key, value, slot_mapping, *self.scales(layer))

    def halves(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V, each ``[num_blocks, block_size, num_kv_heads, head_size]``."""
        return compat.keys_before_values(kv_cache, self.head_size)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FastAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend ``query [num_tokens, num_heads, head_size]`` into ``output`` (same shape).

        Decoder layers attend over the cache. Encoder-only layers attend over ``key`` and ``value``
        ``[>= num_tokens, num_kv_heads, head_size]``; decoder layers ignore these, which layers that share another
        layer's cache do not have.

        ``num_tokens`` may include padding beyond the batch's real tokens; those rows are not changed.
        """
        if attn_metadata is None:  # vLLM's profiling and warm-up runs
            return output.fill_(0)
        batch = attn_metadata.batch
        if self.is_encoder:
            starts = batch.query_start_loc[:-1]
            cpu_kernels.run(self._problem_of(layer, query, key, value, batch, kv_start_loc=starts), out=output)
            return output
        if kv_cache is not self._bound:
            self._bind(kv_cache)
        if self._attention is None:
            halves = self.split(kv_cache)
            problem = self._problem_of(layer, query, *halves, batch, block_table=batch.block_table)
            self._attention = LayerAttention(problem, output)
        self._attention.run(query, batch, output, self.float_sinks(), *self.scales(layer))
        return output

    def _bind(self, kv_cache: torch.Tensor) -> None:
        """Use ``kv_cache`` from now on. vLLM binds a cache before the first step, and may bind another one later."""
        self._bound, self._attention, self._writer = kv_cache, None, LayerWriter(*self.split(kv_cache))

    def _problem_of(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: cpu_layer.Batch,
        **where: torch.Tensor,
    ) -> AttentionProblem:
        return self.problem(
            layer,
            query=query,
            key=key,
            value=value,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            causal=batch.causal,
            **where,
        )
