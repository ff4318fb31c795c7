"""The attention backend for Ascend NPUs, inside vllm-ascend 0.23, with its metadata and its caches.

Not yet run on hardware. vllm-ascend's own classes still run context parallelism and its int8 cache ("C8"). They also
run captured graphs, because vllm-ascend's code updates these on replay.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionType
from vllm_ascend.attention import attention_v1
from vllm_ascend.attention.attention_v1 import AscendAttentionBackend, AscendAttentionBackendImpl, AscendMetadata

from fastattention_vllm.attention import ascend
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.integration.ascend import kernel_choice
from fastattention_vllm.integration.ascend.device import AscendHostMetadataBuilder, AscendRuntime
from fastattention_vllm.integration.claims import DeviceImplsOwn, DevicesOwn, owning
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.host_layers.metadata import HostLayerMixin
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.tiling.attention_rows import one_causality

logger = init_logger("vllm.fastattention")


class FastAttentionAscendBackend(DevicesOwn, AscendAttentionBackend):
    """``--attention-backend fastattention`` on a 910. vllm-ascend's runner requires a subclass of its own backend."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        upstream: type[Any] = AscendAttentionBackend.get_impl_cls()
        if upstream is not AscendAttentionBackendImpl:
            logger.info_once("vllm-ascend's own backend runs these layers: %s.", upstream.__name__)
            return upstream
        return FastAttentionAscendImpl


@owning(DeviceImplsOwn)
class FastAttentionAscendImpl(AscendAttentionBackendImpl):
    """One attention layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # vllm-ascend accepts both and ignores them.
        if alibi_slopes is not None or logits_soft_cap:
            asked = "ALiBi position bias" if alibi_slopes is not None else f"a soft cap of {logits_soft_cap}"
            raise Refusal(
                f"this model uses {asked}, which the NPU's fused attention does not support; serve another model."
            )
        if sliding_window is not None and sliding_window < 2:
            raise Refusal(
                f"this model's sliding window is {sliding_window} token(s), but at least 2 are needed; serve another "
                "model."
            )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            # vLLM's window includes the query's own token; the operator's pre_tokens does not. vllm-ascend 0.23 passes
            # vLLM's number, so every query sees one key too many. Correcting it here also corrects captured graphs.
            None if sliding_window is None else sliding_window - 1,
            kv_cache_dtype,
            logits_soft_cap,
            *args,
            **kwargs,
        )
        self.upstream_reason = self._why_upstream()
        if self.upstream_reason:
            logger.info_once("vllm-ascend's own backend runs these layers: %s.", self.upstream_reason)
            return
        self.kernels = kernel_choice.choose(self.vllm_config, self._any_problem())

    @property
    def kernels_name(self) -> str:
        return "vllm-ascend's own backend" if self.upstream_reason else kernel_choice.NAMES[self.kernels]

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        if not self.upstream_reason and self.kernels is not ascend:
            dtype = self.vllm_config.model_config.dtype
            kernel_choice.compile_at_start(dtype, self.head_size, self.num_heads // self.num_kv_heads)
        host_layers.set_up(self.vllm_config, AscendRuntime(self.vllm_config, HostLayerAscendBackend))

    def forward_fused_infer_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AscendMetadata,
        output: torch.Tensor,
        kv_cache: Any = None,
    ) -> torch.Tensor:
        """Attention of one step into ``output`` ``[num_tokens, num_heads, head_size]``. Padding is not changed."""
        if self.upstream_reason or attention_v1._EXTRA_CTX.capturing:
            answer: torch.Tensor = super().forward_fused_infer_attention(
                query, key, value, attn_metadata, output, kv_cache
            )
            return answer
        problem = self.step(query, key, value, attn_metadata, kv_cache)
        out, _ = self.kernels.run(problem)
        output[: len(out)] = out
        return output

    def step(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: AscendMetadata, kv_cache: Any
    ) -> AttentionProblem:
        """vllm-ascend's metadata as a problem, over this step's tokens for new sequences, else over the cache.

        The Triton kernels read the cache in both cases; it already holds this step's tokens.
        """
        causal = one_causality(attn_metadata.causal)
        if self.kernels is ascend:
            key, value, page, table, _ = self._get_fia_params(key, value, attn_metadata, kv_cache)
        else:
            key, value, table = self.key_cache, self.value_cache, attn_metadata.block_tables
            page = key.shape[1]
        # Padding for parallel layers is an additional sequence at the end, with more query tokens than keys.
        real = attn_metadata.num_actual_tokens
        ends = [min(end, real) for end in attn_metadata.actual_seq_lengths_q]
        starts = torch.tensor([0, *ends], dtype=torch.int32)
        where: dict[str, Any]
        if table is None:
            lengths = starts.diff()
            where = {"key": key[:real], "value": value[:real], "kv_start_loc": starts[:-1]}
        else:
            lengths = torch.tensor(attn_metadata.seq_lens_list[: len(ends)], dtype=torch.int32)
            shape = (-1, page, self.num_kv_heads, self.head_size)
            where = {"key": key.view(shape), "value": value.view(shape), "block_table": table[: len(ends)]}
        return self.problem(None, query=query[:real], query_start_loc=starts, seq_lens=lengths, causal=causal, **where)

    @property
    def host_window(self) -> int | None:
        """A property of the class, so that layers whose class vllm-ascend replaces lack it."""
        window: int | None = self.sliding_window
        return window

    def problem(self, layer: Any, **parts: Any) -> AttentionProblem:
        """A problem with this layer's scale and window. ``parts`` are the batch's tensors, or override fields."""
        window = (-1 if self.sliding_window is None else self.sliding_window, -1)
        return AttentionProblem(**({"scale": self.scale, "window": window} | parts))

    def scales(self, layer: Any) -> tuple[float, float]:
        return (1.0, 1.0)

    def merges(self) -> bool:
        return True

    def cache_dtype(self, kv_cache: torch.Tensor) -> torch.dtype:
        return kv_cache.dtype

    def why_not_on_host(self) -> str | None:
        """The feature that keeps this layer on the NPU, or None."""
        if self.kv_cache_dtype not in ("auto", "float16", "bfloat16"):
            return f"--kv-cache-dtype {self.kv_cache_dtype}"
        return self.upstream_reason

    def _why_upstream(self) -> str | None:
        if self.sinks is not None:
            return "attention sinks"
        if self.attn_type != AttentionType.DECODER:
            return f"attention type {self.attn_type}"
        return "sparse KV (enable_hamming_sparse)" if self.enable_hamming_sparse else None

    def _any_problem(self) -> AttentionProblem:
        """A problem with this layer's shapes, to detect unsupported layers at start instead of at the first request."""
        dtype = self.vllm_config.model_config.dtype
        page = AscendAttentionBackend.get_supported_kernel_block_sizes()[0]
        cache = torch.empty(1, page, self.num_kv_heads, self.head_size, dtype=dtype, device="meta")
        return AttentionProblem(
            query=torch.empty(2, self.num_heads, self.head_size, dtype=dtype, device="meta"),
            key=cache,
            value=cache,
            query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
            seq_lens=torch.tensor([2], dtype=torch.int32),
            scale=self.scale,
            causal=True,
            block_table=torch.zeros(1, 1, dtype=torch.int32, device="meta"),
        )


class HostLayerAscendBackend(HostLayerMixin, FastAttentionAscendBackend):
    """The backend for host layers on an NPU."""

    builder = AscendHostMetadataBuilder
