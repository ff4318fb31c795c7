"""The attention backend for NVIDIA GPUs below compute capability 8.0, with the V100 and Turing kernels.

``volta_kernels: ptx`` or ``ptx-sm_75`` runs it on newer GPUs, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.attention.volta import kernels as volta
from fastattention_vllm.attention.volta.images import ImageError
from fastattention_vllm.attention.volta.launch import DECODE_ROWS, HEAD_SIZES, VOLTA, decode_tokens
from fastattention_vllm.integration import compat, drafter, support
from fastattention_vllm.integration.base import Backend, Layer
from fastattention_vllm.integration.claims import BuilderClaims
from fastattention_vllm.integration.cuda import gated_delta
from fastattention_vllm.integration.cuda.decode_graph import GraphHostLayerMixin
from fastattention_vllm.integration.cuda.device import CudaRuntime, preferred_block_size
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.tiling import row_parallel, small_sums
from fastattention_vllm.integration.tiling.attention_rows import one_causality, row_blocks

logger = init_logger("vllm.fastattention")


class FastAttentionVoltaBackend(Backend):
    """``--attention-backend fastattention`` on these GPUs."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", *support.FP8_CACHES]

    @staticmethod
    def get_impl_cls() -> type[Layer]:
        return FastAttentionVoltaImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return VoltaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return preferred_block_size(super().get_preferred_block_size(default_block_size))

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability >= (7, 0))

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in HEAD_SIZES


@dataclass(frozen=True)
class RequestGroup:
    """Consecutive requests of a step or block. All tensors are on the GPU; see ``AttentionProblem``."""

    extent: volta.Extent
    query_start_loc: torch.Tensor
    """int32 ``[requests + 1]``, positions in the query of the whole step or block."""
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    workspace: torch.Tensor


@dataclass(frozen=True)
class Block:
    """Rows of a step that are computed before the following rows."""

    rows: slice
    request_groups: tuple[RequestGroup, ...]


@dataclass
class VoltaMetadata:
    """One step's batch: decoding requests, which have a kernel of their own, and others. Not frozen: classes of vLLM's
    that derive from it set its fields one by one."""

    request_groups: tuple[RequestGroup, ...]
    causal: bool
    slot_mapping: torch.Tensor
    blocks: tuple[Block, ...] = ()
    """The same requests in blocks of rows, if o_proj starts with the first rows while the next ones are computed."""


_workspaces: WeakValueDictionary[torch.device, torch.Tensor] = WeakValueDictionary()


def heads_of(vllm_config: Any) -> tuple[int, int]:
    """KV heads of this rank, and query heads per KV head."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    kv_heads = model.get_num_kv_heads(parallel)
    return kv_heads, model.get_num_attention_heads(parallel) // kv_heads


def workspace(vllm_config: Any, head_size: int, device: torch.device) -> torch.Tensor:
    """The fp32 workspace for the key parts of any launch. All layers on ``device`` share it, as they run one by one.

    Layers allocate it when they are loaded, before vLLM measures the memory for the cache. Builders get the same one.
    """
    kv_heads, group = heads_of(vllm_config)
    seqs, longest = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
    floats = volta.partial_floats(head_size, group, kv_heads, seqs, longest, drafter.drafts_per_request(vllm_config))
    found = _workspaces.get(device)
    if found is None or found.numel() < floats:
        found = _workspaces[device] = torch.empty(floats, dtype=torch.float32, device=device)
    return found


class VoltaMetadataBuilder(BuilderClaims, AttentionMetadataBuilder[Any]):
    """Copies the kernels' inputs into buffers with fixed addresses, because a captured graph contains the addresses."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        support.check_kv_cache(vllm_config)
        chunk = getattr(kv_cache_spec, "attention_chunk_size", None)
        if chunk is not None:  # vLLM then splits one request into several, which do not fit into these buffers
            raise Refusal(
                f"this model attends within chunks of {chunk} tokens, which the Volta kernels do not support; serve "
                "another model."
            )
        group = heads_of(vllm_config)[1]
        # The maximum number of query tokens per request for the decode kernels. It is at least one, so that vLLM puts
        # these requests first; with more query heads per KV head than their rows, the prefill kernel still runs them.
        self._init_reorder_batch_threshold(decode_tokens(group, drafter.drafts_per_request(vllm_config)))
        assert self.reorder_batch_threshold is not None
        # If decoding requests may need the wide kernel, it runs all of them in every step, so that the answer to a
        # request does not depend on the others in its batch.
        wide = self.reorder_batch_threshold * group > DECODE_ROWS
        self.decoded_tokens = self.reorder_batch_threshold if wide else 1
        self.max_model_len = vllm_config.model_config.max_model_len
        seqs = vllm_config.scheduler_config.max_num_seqs
        self.query_start_loc = torch.zeros(seqs + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(seqs, dtype=torch.int32, device=device)
        self.block_table: torch.Tensor | None = None
        self.workspace = workspace(vllm_config, kv_cache_spec.head_size, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> VoltaMetadata:
        metadata = self._build(common_attn_metadata, int(common_attn_metadata.max_seq_len))
        cut = row_parallel.attention_blocks()
        if cut is None or not metadata.causal:
            return metadata
        starts = common_attn_metadata.query_start_loc_cpu[: common_attn_metadata.num_reqs + 1].tolist()
        sizes = cut.of(starts[-1])
        return metadata if len(sizes) < 2 else replace(metadata, blocks=self._blocks(sizes, starts, metadata))

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> VoltaMetadata:
        return self._build(common_attn_metadata, self.max_model_len)

    def _build(self, common: CommonAttentionMetadata, longest: int) -> VoltaMetadata:
        causal = one_causality(common.causal)
        seqs = common.num_reqs
        starts, lengths = self.query_start_loc[: seqs + 1], self.seq_lens[:seqs]
        table = self._table(common.block_table_tensor)[:seqs]
        starts.copy_(common.query_start_loc[: seqs + 1])
        lengths.copy_(common.seq_lens[:seqs])
        table.copy_(common.block_table_tensor[:seqs])
        assert self.reorder_batch_threshold is not None
        decodes = split_decodes_and_prefills(common, self.reorder_batch_threshold)[0]
        tokens = common.query_start_loc_cpu[1 : seqs + 1] - common.query_start_loc_cpu[:seqs]
        request_groups = tuple(
            RequestGroup(
                volta.Extent(max(least, int(tokens[begin:end].max())), longest),
                starts[begin : end + 1],
                lengths[begin:end],
                table[begin:end],
                self.workspace,
            )
            for begin, end, least in ((0, decodes, self.decoded_tokens), (decodes, seqs, 1))
            if begin < end
        )
        return VoltaMetadata(request_groups, causal, common.slot_mapping)

    def _blocks(self, sizes: Sequence[int], starts: Sequence[int], metadata: VoltaMetadata) -> tuple[Block, ...]:
        """The blocks of a step whose rows are split. Graphs are captured without blocks."""
        seqs, decodes = len(starts) - 1, len(metadata.request_groups[0].seq_lens)
        longest = metadata.request_groups[0].extent.longest
        assert self.block_table is not None
        found = []
        for block in row_blocks(sizes, starts, self.query_start_loc[: seqs + 1], self.seq_lens[:seqs]):
            request_groups = []
            for begin, end, least in (
                (block.first, min(decodes, block.last), self.decoded_tokens),
                (max(decodes, block.first), block.last, 1),
            ):
                if begin >= end:
                    continue
                tokens = max(min(starts[i + 1], block.end) - max(starts[i], block.begin) for i in range(begin, end))
                own = slice(begin - block.first, end - block.first)
                request_groups.append(
                    RequestGroup(
                        volta.Extent(max(least, tokens), longest),
                        block.starts[own.start : own.stop + 1],
                        block.lengths[own],
                        self.block_table[begin:end],
                        self.workspace,
                    )
                )
            found.append(Block(slice(block.begin, block.end), tuple(request_groups)))
        return tuple(found)

    def _table(self, given: torch.Tensor) -> torch.Tensor:
        """The buffer for block tables, created with the first table, whose width is the maximum for a request."""
        if self.block_table is None:
            self.block_table = torch.zeros(len(self.seq_lens), given.shape[1], dtype=torch.int32, device=given.device)
        return self.block_table


class HostLayerVoltaBackend(GraphHostLayerMixin, FastAttentionVoltaBackend):
    """The backend for host layers on these GPUs."""


class FastAttentionVoltaImpl(Layer):
    """One attention layer. It becomes a host layer if the plan says so."""

    layer: Any = None
    """vLLM's, once weights are loaded."""
    loaded_scales: tuple[float, float] | None = None
    """Of keys and values in the cache, as first loaded."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        vllm_config = get_current_vllm_config_or_none()
        self._check_scales(vllm_config)
        if vllm_config is None:  # vLLM up to 0.23 loads weights again without one; what follows is done by then
            return
        adjusted = self.softcap > 0 or self.alibi_slopes is not None
        target = volta.choose(options_of(vllm_config).volta_kernels)
        if target.suffix == "ptx":
            logger.info_once(
                "The driver compiles the Volta kernels from PTX, which takes some seconds. It keeps the result for the "
                "next start."
            )
        try:
            volta.load(self.head_size, adjusted=adjusted, cache=self.fp8 or torch.float16)
            if target.architecture == VOLTA:
                gated_delta.install(vllm_config)
        except ImageError as error:
            raise Refusal(str(error)) from error
        device = torch.device("cuda", torch.cuda.current_device())
        self.workspace = workspace(vllm_config, self.head_size, device)
        if self.alibi_slopes is not None:
            self.alibi_slopes = self.alibi_slopes.to(device)
        if options_of(vllm_config).tiling_all_reduce != "off":
            compat.before_gpu_profiling(row_parallel.enable_tiling)
        small_sums.set_up(vllm_config)
        self.kernels_name = f"fastattention Volta, {target}"
        logger.info_once("Attention kernels: %s.", self.kernels_name)
        host_layers.set_up(vllm_config, CudaRuntime(vllm_config, HostLayerVoltaBackend, volta, self.kernels_name))

    def _check_scales(self, vllm_config: Any) -> None:
        """
        Raises:
            Refusal: other scales of the KV cache than at the start, which are numbers in captured graphs.
        """
        if vllm_config is not None:
            layers = vllm_config.compilation_config.static_forward_context.values()
            self.layer = next((layer for layer in layers if getattr(layer, "impl", None) is self), None)
        scales = None if self.layer is None else self.scales(self.layer)
        if self.loaded_scales not in (None, scales):
            raise Refusal(
                f"the new weights have KV cache scales {scales} instead of {self.loaded_scales}, and captured CUDA "
                "graphs keep the old ones; start the engine again with the new weights."
            )
        self.loaded_scales = scales

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if not self.is_encoder:
            volta.write_kv(key, value, *self.split(kv_cache), slot_mapping, *self.scales(layer))

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend ``query`` into ``output``, as on CPUs."""
        if attn_metadata is None:  # vLLM's profiling and warm-up runs
            return output.fill_(0)
        metadata: VoltaMetadata = attn_metadata
        if self.is_encoder:
            key, value = volta.alike(key, value)
        else:
            key, value = self.split(kv_cache)

        def attend(request_groups: tuple[RequestGroup, ...], rows: slice) -> None:
            for requests in request_groups:
                where = (
                    {"kv_start_loc": requests.query_start_loc}
                    if self.is_encoder
                    else {"block_table": requests.block_table}
                )
                problem: AttentionProblem = self.problem(
                    layer,
                    query=query[rows],
                    key=key,
                    value=value,
                    query_start_loc=requests.query_start_loc,
                    seq_lens=requests.seq_lens,
                    causal=metadata.causal,
                    **where,
                )
                volta.attend(problem, requests.extent, output[rows], workspace=requests.workspace)

        following = row_parallel.attention_blocks()
        if following is None or not metadata.blocks:
            attend(metadata.request_groups, slice(None))
            return output
        following.ready.begin(output)
        for block in metadata.blocks:
            attend(block.request_groups, block.rows)
            following.ready.mark(output, block.rows.stop)
        return output

    def why_not_on_host(self) -> str | None:
        """The feature that keeps this layer on the GPU, or None."""
        if self.fp8 is not None:
            return f"--kv-cache-dtype {self.kv_cache_dtype}"
        return None if self.alibi_slopes is None else "ALiBi position bias"
