"""An NVIDIA GPU beside the host: what host layers need of it, whichever kernels it runs."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

from fastattention_vllm.attention import cpu as cpu_kernels
from fastattention_vllm.integration import compat, cpu_resources, host_layers
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.placement.cooperative import STAGING_BYTES, Batch, Device
from fastattention_vllm.placement.link import CudaLink, Link

logger = init_logger("vllm.fastattention")

WORKSPACE = 1 << 30
"""For libraries' workspaces and CUDA graphs, beside the activations, where "auto" reckons with device memory."""
HOST_BLOCK = 128
"""Tokens. 16 of them give the CPU 0.9 of that rate (benchmarks/NOTES.md)."""
SPIN_SECONDS = 0.003
"""From one host layer to the next the attention threads stay awake: meanwhile the GPU computes, and nobody wants their
CPUs."""


def preferred_block_size(otherwise: int) -> int:
    """Tokens of a block, where --block-size does not say: host memory is read faster in larger pieces."""
    none = options_of(get_current_vllm_config()).host_kv_layers in (0, [])
    return otherwise if none else max(otherwise, HOST_BLOCK)


class CudaHostMetadataBuilder(AttentionMetadataBuilder[Any]):
    """Lengths, block tables and slots come down once per step, beside the computation; host layers wait for them.

    They are read from the device because only there they are exact: with asynchronous scheduling the host knows bounds.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.stream = torch.cuda.Stream(device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> host_layers.HostMetadata:
        common = common_attn_metadata
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].clone()
        slots = common.slot_mapping[: int(starts[-1])]
        blocks = -(-int(common.max_seq_len) // self.kv_cache_spec.block_size)
        wanted = [common.seq_lens[: common.num_reqs], common.block_table_tensor[: common.num_reqs, :blocks], slots]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            coming = [tensor.to("cpu", non_blocking=True) for tensor in wanted]
            there = self.stream.record_event()

        def arrive() -> Batch:
            there.synchronize()
            lengths, table, host_slots = coming
            return Batch(starts, lengths, table, host_slots, slots, bool(common.causal))

        return host_layers.HostMetadata(None, arrive)


class CudaSide:
    """One GPU beside the host."""

    pin = True

    def __init__(self, vllm_config: Any, host_backend: type[Any], kernels: Device, named: str) -> None:
        """``host_backend``: of its host layers. ``kernels``: which compute the GPU's part of them."""
        self.vllm_config = vllm_config
        self.host_backend = host_backend
        self._kernels = kernels
        self.named = named
        self.device = torch.device("cuda", torch.cuda.current_device())

    def cpus(self) -> list[int]:
        ranks = self.vllm_config.parallel_config.local_world_size
        return cpu_resources.split_cpus(cpu_resources.physical_cpus(), ranks)[host_layers.local_rank()]

    def settle_block_size(self) -> None:
        cache = self.vllm_config.cache_config
        if not getattr(cache, "user_specified_block_size", True):  # versions without it have asked already
            cache.block_size = preferred_block_size(cache.block_size)

    def prepare(self) -> None:
        """Start the CPU's threads, leaving one core to the engine and the API server; hook into vLLM's worker."""
        cpus = self.cpus()
        own = cpus[1:] if len(cpus) > 1 else cpus
        threads = options_of(self.vllm_config).cpu_threads or len(own)
        try:
            cpu_kernels.set_num_threads(threads, own)
            cpu_kernels.set_spin(SPIN_SECONDS)
        except (RuntimeError, ValueError) as error:
            raise Refusal(f"host layers need the CPU kernels: {error}") from error
        logger.info_once(
            "Host layers: instruction set %s, %s; the GPU's part by %s.",
            cpu_kernels.isa(),
            cpu_resources.describe_pinning(threads, own, cpus),
            self.named,
        )
        compat.extend_gpu_worker(host_layers.find)

    def kernels(self) -> Device:
        return self._kernels

    def link(self) -> Link:
        return CudaLink(self.device)

    def kv_bytes(self) -> int:
        """Roughly what vLLM's own profiling will find later; should it find less, its own check says so."""
        config = self.vllm_config
        asked = config.cache_config.kv_cache_memory_bytes
        if asked:
            return int(asked)
        free, total = torch.cuda.mem_get_info(self.device)
        model, ranks = config.model_config.hf_text_config, config.parallel_config.tensor_parallel_size
        tokens, seqs = config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs
        hidden = model.hidden_size
        wide = 3 * getattr(model, "intermediate_size", 4 * hidden) // ranks
        activations = 2 * tokens * (4 * hidden + wide) + 8 * seqs * model.vocab_size
        used = total - free
        utilization = config.cache_config.gpu_memory_utilization
        return int(max(0, total * utilization - used - activations - WORKSPACE - 2 * STAGING_BYTES))
