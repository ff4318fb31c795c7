"""One step's batch for host layers. vLLM builds one metadata object per backend class, so they need their own class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

from fastattention_vllm.integration.claims import BuilderClaims, HostLayerClaims
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.tiling.attention_rows import one_causality
from fastattention_vllm.placement.graph_calls import GraphBatch
from fastattention_vllm.placement.step import Batch, Step, divide

NO_LIMIT = 1 << 30
"""Limit of new tokens per CPU request if partial results cannot be merged exactly: the CPU then attends to all."""


NOT_COMPUTED = ("mm_req_doc_ranges", "rswa_prefix_lens", "dcp_local_seq_lens")
"""Of vLLM's CommonAttentionMetadata, what changes who attends to whom, and host layers do not do. Models and options
that ask for it get no host layers; this is for one that the start-up check does not know."""


@dataclass
class HostMetadata:
    """One step's batch for the host layers of a block table. It may still be in transit to the host."""

    batch: Batch | None
    arrive: Any = None
    """If ``batch`` is None: waits for the batch and returns it. Called once."""
    graph_batch: GraphBatch | None = None
    """The batch in the device's buffers, if it is captured in a graph."""
    _step: Step | None = None

    def whole(self) -> Batch:
        """The batch. The first call waits for it."""
        if self.batch is None:
            self.batch = self.arrive()
        return self.batch

    def stores_nothing(self, block_size: int) -> bool:
        """Whether no token has a slot, as in vLLM's warm-up. Up to 0.19 it has slots of block 0, which nobody owns."""
        return bool((self.whole().slot_mapping < block_size).all())

    def divided(self, block_size: int, max_cpu_tokens: int) -> Step:
        if self._step is None:
            batch = self.whole()
            self._step = divide(batch, block_size, max_cpu_tokens if batch.causal else NO_LIMIT)
        return self._step


class HostMetadataBuilder(BuilderClaims, AttentionMetadataBuilder[Any]):
    """Copies a step's lengths, block tables and slots to the host, where host layers wait for them.

    They are copied from the GPU or NPU once per step, in parallel with the computation. Only the device has the exact
    values: with asynchronous scheduling, the host knows only bounds. On a CPU-only machine nothing is copied.
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
        for name in NOT_COMPUTED:
            asked = getattr(common, name, None)
            if asked is not None and (not isinstance(asked, dict) or any(asked.values())):
                raise Refusal(f"a batch asks for {name}, which host layers do not compute; set host_kv_layers to 0.")
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
        """The first token of each request, and the end: int32 ``[requests + 1]`` on the host."""
        starts: torch.Tensor = common.query_start_loc_cpu[: common.num_reqs + 1].clone()
        return starts

    def page(self) -> int:
        """Tokens per block of the block tables."""
        size: int = self.kv_cache_spec.block_size
        return size

    def batch(self, *parts: Any) -> Batch:
        """A :class:`Batch` of these tensors, which are all on the host by now."""
        return Batch(*parts)


class HostLayerMixin(HostLayerClaims):
    """Mixin placed ahead of a device's backend in the MRO, which makes it the backend of host layers."""

    builder: ClassVar[type[HostMetadataBuilder]] = HostMetadataBuilder

    @classmethod
    def get_builder_cls(cls) -> type[HostMetadataBuilder]:
        return cls.builder
