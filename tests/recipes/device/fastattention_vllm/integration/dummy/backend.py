"""The attention backend on the dummy device of tests/test_recipes.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf

from fastattention_vllm.attention import dummy
from fastattention_vllm.integration.base import Backend, Layer
from fastattention_vllm.integration.claims import BuilderClaims
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.tiling.attention_rows import one_causality

logger = init_logger("vllm.fastattention")


class FastAttentionDummyBackend(Backend):
    """``--attention-backend fastattention`` on the dummy device."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(dummy.DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_impl_cls() -> type[Layer]:
        return FastAttentionDummyImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return DummyMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return True  # there is only one kind of dummy device

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return False


@dataclass
class DummyMetadata:
    """One step's batch. Lengths are on the host."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    causal: bool


class DummyMetadataBuilder(BuilderClaims, AttentionMetadataBuilder[Any]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> DummyMetadata:
        common = common_attn_metadata
        return DummyMetadata(
            query_start_loc=common.query_start_loc_cpu[: common.num_reqs + 1],
            seq_lens=common.seq_lens[: common.num_reqs].cpu(),
            block_table=common.block_table_tensor[: common.num_reqs],
            causal=one_causality(common.causal),
        )


class FastAttentionDummyImpl(Layer):
    """One attention layer."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        asked = options_of(get_current_vllm_config()).host_kv_layers
        if asked not in ("auto", 0, []):
            raise Refusal(f"host_kv_layers is {asked}, but the dummy device keeps all KV; leave host_kv_layers out.")
        logger.info_once("Attention kernels: dummy.")

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if not self.is_encoder:
            dummy.write_kv(key, value, *self.split(kv_cache), slot_mapping)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: DummyMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:  # vLLM's profiling and warm-up runs
            return output.fill_(0)
        batch, where = attn_metadata, {"block_table": attn_metadata.block_table}
        if self.is_encoder:  # an encoder has no cache: every request is computed in a single step
            where = {"kv_start_loc": batch.query_start_loc[:-1]}
        else:
            key, value = self.split(kv_cache)
        problem = self.problem(
            layer,
            query=query,
            key=key,
            value=value,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            causal=batch.causal,
            **where,
        )
        dummy.run(problem, out=output)
        return output
