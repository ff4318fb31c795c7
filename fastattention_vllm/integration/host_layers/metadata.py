"""One step's batch for host layers. vLLM builds one metadata object per backend class, so they have their own class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

from fastattention_vllm.integration.claims import BuilderClaims, HostLayerClaims
from fastattention_vllm.integration.tiling.attention_rows import one_causality
from fastattention_vllm.placement.step import Batch, Step, divide

NO_LIMIT = 1 << 30
"""New tokens up to which the CPU attends, where partial results of a device could not be merged exactly."""


@dataclass
class HostMetadata:
    """One step's batch for the host layers of a block table; it may still be on its way to the host."""

    batch: Batch | None
    arrive: Any = None
    """Called once, where ``batch`` is None: waits for it."""
    _step: Step | None = None

    def divided(self, block_size: int, max_cpu_tokens: int) -> Step:
        if self._step is None:
            if self.batch is None:
                self.batch = self.arrive()
            self._step = divide(self.batch, block_size, max_cpu_tokens if self.batch.causal else NO_LIMIT)
        return self._step


class HostMetadataBuilder(BuilderClaims, AttentionMetadataBuilder[Any]):
    """Brings a step's lengths, block tables and slots to the host; host layers wait for them.

    From a GPU or NPU they come once per step, beside the computation. They are read from the device because only there
    they are exact: with asynchronous scheduling the host knows bounds. On a machine with neither, they are there.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.runtime: Any = torch.get_device_module(device)
        self.stream = None if device.type == "cpu" else self.runtime.Stream(device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> HostMetadata:
        common = common_attn_metadata
        causal = one_causality(common.causal)
        starts = self.starts(common)
        requests = len(starts) - 1
        slots = common.slot_mapping[: int(starts[-1])]
        blocks = -(-int(common.max_seq_len) // self.page())
        wanted = [common.seq_lens[:requests], common.block_table_tensor[:requests, :blocks], slots]
        if self.stream is None:
            return HostMetadata(self.batch(starts, *wanted, slots, causal))
        self.stream.wait_stream(self.runtime.current_stream())
        with self.runtime.stream(self.stream):
            coming = [tensor.to("cpu", non_blocking=True) for tensor in wanted]
            there = self.stream.record_event()

        def arrive() -> Batch:
            there.synchronize()
            lengths, table, host_slots = coming
            return self.batch(starts, lengths, table, host_slots, slots, causal)

        return HostMetadata(None, arrive)

    def starts(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """int32 ``[requests + 1]``, on the host: where each request's tokens begin."""
        starts: torch.Tensor = common.query_start_loc_cpu[: common.num_reqs + 1].clone()
        return starts

    def page(self) -> int:
        """Tokens of a block of the block tables."""
        size: int = self.kv_cache_spec.block_size
        return size

    def batch(self, *parts: Any) -> Batch:
        """Of what :class:`Batch` has, all of it there."""
        return Batch(*parts)


class HostLayerMixin(HostLayerClaims):
    """Mixin placed ahead of a device's backend: the backend of its host layers."""

    builder: ClassVar[type[HostMetadataBuilder]] = HostMetadataBuilder

    @classmethod
    def get_builder_cls(cls) -> type[HostMetadataBuilder]:
        return cls.builder
