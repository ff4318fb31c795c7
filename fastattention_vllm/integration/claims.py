"""The capabilities that this package's backends claim when vLLM queries them.

vLLM's base classes have a default for every capability, and new versions add capabilities. One of them, "is the backend
correct if the device's query lengths differ from the host's?", is true by default for every backend. So the backends of
this package inherit no answer. The classes below come before vLLM's in the MRO and answer no. A backend overrides the
answers for features that it was tested with. Layers that run vLLM's own code, such as FlashAttention on GPUs, pass
vLLM's answers on explicitly.

``CLAIMS`` and ``WORKINGS`` together list all attributes of the base classes in all supported versions. A test fails if
an attribute is in neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from vllm.v1.attention.backend import AttentionCGSupport

CLAIMS = {
    "backend": (
        "accept_output_buffer",
        "forward_includes_kv_cache_update",
        "get_preferred_block_size",
        "get_supported_head_sizes",
        "get_supported_kernel_block_sizes",
        "indexes_kv_by_block_stride",
        "is_mla",
        "is_sparse",
        "is_ssm",
        "supported_dtypes",
        "supported_kv_cache_dtypes",
        "supported_kv_cache_layouts",
        "supports_alibi_sqrt",
        "supports_attn_type",
        "supports_batch_invariance",
        "supports_block_size",
        "supports_combination",
        "supports_compute_capability",
        "supports_dcp",
        "supports_device_cpu_query_lens_mismatch",
        "supports_dtype",
        "supports_head_size",
        "supports_kv_cache_dtype",
        "supports_kv_cache_update_bypass",
        "supports_kv_connector",
        "supports_mm_prefix",
        "supports_non_causal",
        "supports_non_causal_dcp",
        "supports_pcp",
        "supports_per_head_quant_scales",
        "supports_rswa",
        "supports_sink",
        "supports_sliding_window",
    ),
    "impl": (
        "can_return_lse_for_decode",
        "fused_output_quant_supported",
        "fused_qk_norm_mrope_kvcache_supported",
        "fused_qk_norm_rope_kvcache_supported",
        "fused_rope_kvcache_supported",
        "is_sparse",
        "lse_base_on_e",
        "need_to_return_lse_for_decode",
        "set_interleaved_v_cache",
        "supports_dcp",
        "supports_dense_mha_prefill",
        "supports_mtp_with_cp_non_trivial_interleave_size",
        "supports_pcp",
        "supports_quant_query_input",
    ),
    "builder": (
        "_cudagraph_support",
        "get_cudagraph_support",
        "get_varlen_cudagraph_max_query_len",
        "reorder_batch_threshold",
        "requires_block_table_width",
        "supports_draft_decode_metadata_update",
        "supports_update_block_table",
        "use_cascade_attention",
    ),
}
"""The capabilities that this package's backends, layers and builders answer themselves, by vLLM's names."""

WORKINGS = {
    "backend": (
        "customize_spec",
        "full_cls_name",
        "get_builder_cls",
        "get_fp8_dtype_for_flashattn",
        "get_impl_cls",
        "get_kv_cache_block_dim",
        "get_kv_cache_shape",
        "get_kv_cache_stride_order",
        "get_name",
        "get_required_kv_cache_layout",
        "head_size_v",
        "validate_configuration",
    ),
    "impl": (
        "do_kv_cache_update",
        "do_qk_norm_mrope_kvcache_update",
        "do_qk_norm_rope_kvcache_update",
        "do_rope_and_kv_cache_update",
        "forward",
        "get_impl_variants",
        "kv_quant_mode",
        "prepare_for_batch",
        "process_weights_after_loading",
    ),
    "builder": (
        "build",
        "build_for_cudagraph_capture",
        "build_for_drafting",
        "update_block_table",
        "update_draft_decode_metadata",
    ),
}
"""All other attributes of those classes: the cache's layout, and functions that are called only after a claim."""


class PassedOn:
    """Passes on the answer of the next class in the MRO: vLLM's or vllm-ascend's, whose code these layers run."""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self.owner, self.name = owner, name

    def __get__(self, instance: object, cls: type[Any]) -> Any:
        return getattr(super(self.owner, cls if instance is None else instance), self.name)


class BackendClaims:
    """The answers of a backend: no, unless a subclass says yes or the answer follows from other answers."""

    accept_output_buffer = True
    """<= 0.19: forward() writes into the given output. Newer versions assume this."""
    forward_includes_kv_cache_update: ClassVar[bool] = False
    supports_kv_cache_update_bypass: ClassVar[bool] = False
    supported_dtypes: ClassVar[list[Any]] = []
    supported_kv_cache_dtypes: ClassVar[list[Any]] = []

    # vLLM derives these from the answers above and from the block sizes.
    get_preferred_block_size: Any = PassedOn()
    supports_block_size: Any = PassedOn()
    supports_dtype: Any = PassedOn()
    supports_kv_cache_dtype: Any = PassedOn()

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # supports_head_size answers instead

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool:
        return False

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def is_sparse(cls) -> bool:
        return False

    @classmethod
    def is_ssm(cls) -> bool:
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """The division of keys among threads depends on the other requests."""
        return False

    @classmethod
    def supports_combination(cls, *args: Any, **named: Any) -> str | None:
        return None  # there are no further restrictions on combinations

    @classmethod
    def supports_dcp(cls) -> bool:
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """A step is planned from the lengths on the host."""
        return False

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_non_causal_dcp(cls) -> bool:
        return False

    @classmethod
    def supports_pcp(cls) -> bool:
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False


class DevicesOwn:
    """The answers of a backend whose device layers run the next class's code. All of them are passed on explicitly."""

    accept_output_buffer: Any = PassedOn()
    forward_includes_kv_cache_update: Any = PassedOn()
    supported_dtypes: Any = PassedOn()
    supported_kv_cache_dtypes: Any = PassedOn()
    supports_kv_cache_update_bypass: Any = PassedOn()
    get_preferred_block_size: Any = PassedOn()
    get_supported_head_sizes: Any = PassedOn()
    get_supported_kernel_block_sizes: Any = PassedOn()
    indexes_kv_by_block_stride: Any = PassedOn()
    is_mla: Any = PassedOn()
    is_sparse: Any = PassedOn()
    is_ssm: Any = PassedOn()
    supported_kv_cache_layouts: Any = PassedOn()
    supports_alibi_sqrt: Any = PassedOn()
    supports_attn_type: Any = PassedOn()
    supports_batch_invariance: Any = PassedOn()
    supports_block_size: Any = PassedOn()
    supports_combination: Any = PassedOn()
    supports_compute_capability: Any = PassedOn()
    supports_dcp: Any = PassedOn()
    supports_device_cpu_query_lens_mismatch: Any = PassedOn()
    supports_dtype: Any = PassedOn()
    supports_head_size: Any = PassedOn()
    supports_kv_cache_dtype: Any = PassedOn()
    supports_kv_connector: Any = PassedOn()
    supports_mm_prefix: Any = PassedOn()
    supports_non_causal: Any = PassedOn()
    supports_non_causal_dcp: Any = PassedOn()
    supports_pcp: Any = PassedOn()
    supports_per_head_quant_scales: Any = PassedOn()
    supports_rswa: Any = PassedOn()
    supports_sink: Any = PassedOn()
    supports_sliding_window: Any = PassedOn()


class HostLayerClaims:
    """The answers of host layers, placed ahead of the device's backend: features that host layers do not support.

    Their steps are divided on the host by the host's lengths, and the CPU's share depends on the batch.
    """

    supports_kv_cache_update_bypass: ClassVar[bool] = False
    supports_batch_invariance = BackendClaims.supports_batch_invariance
    supports_dcp = BackendClaims.supports_dcp
    supports_device_cpu_query_lens_mismatch = BackendClaims.supports_device_cpu_query_lens_mismatch
    supports_kv_connector = BackendClaims.supports_kv_connector
    supports_mm_prefix = BackendClaims.supports_mm_prefix
    supports_non_causal_dcp = BackendClaims.supports_non_causal_dcp
    supports_pcp = BackendClaims.supports_pcp
    supports_per_head_quant_scales = BackendClaims.supports_per_head_quant_scales
    supports_rswa = BackendClaims.supports_rswa


class ImplClaims:
    """The answers of a layer: nothing is fused into it, and it returns no partial results."""

    can_return_lse_for_decode: ClassVar[bool] = False
    is_sparse: ClassVar[bool] = False
    lse_base_on_e: ClassVar[bool] = True
    need_to_return_lse_for_decode: bool = False
    supports_dcp: ClassVar[bool] = False
    supports_dense_mha_prefill: bool = False
    supports_mtp_with_cp_non_trivial_interleave_size: ClassVar[bool] = False
    supports_pcp: ClassVar[bool] = False
    supports_quant_query_input: bool = False

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def fused_qk_norm_mrope_kvcache_supported(self) -> bool:
        return False

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        return False

    def fused_rope_kvcache_supported(self) -> bool:
        return False

    def set_interleaved_v_cache(self) -> bool:
        return False


class DeviceImplsOwn:
    """:class:`DevicesOwn` for layers."""

    can_return_lse_for_decode: Any = PassedOn()
    fused_output_quant_supported: Any = PassedOn()
    fused_qk_norm_mrope_kvcache_supported: Any = PassedOn()
    fused_qk_norm_rope_kvcache_supported: Any = PassedOn()
    fused_rope_kvcache_supported: Any = PassedOn()
    is_sparse: Any = PassedOn()
    lse_base_on_e: Any = PassedOn()
    need_to_return_lse_for_decode: Any = PassedOn()
    set_interleaved_v_cache: Any = PassedOn()
    supports_dcp: Any = PassedOn()
    supports_dense_mha_prefill: Any = PassedOn()
    supports_mtp_with_cp_non_trivial_interleave_size: Any = PassedOn()
    supports_pcp: Any = PassedOn()
    supports_quant_query_input: Any = PassedOn()


def owning(answers: type[Any]) -> Callable[[type[Any]], type[Any]]:
    """Give a class those answers as its own attributes, where it may have no other base.

    vllm-ascend assigns ``__class__`` of layers with an int8 cache. Python allows that only among classes with one base.
    """

    def decorate(cls: type[Any]) -> type[Any]:
        for name in vars(answers):
            if isinstance(vars(answers)[name], PassedOn):
                answer = PassedOn()
                answer.__set_name__(cls, name)
                setattr(cls, name, answer)
        return cls

    return decorate


class BuilderClaims:
    """The answers of a metadata builder: no CUDA graphs, no request order, separate metadata for every block table."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None
    requires_block_table_width: ClassVar[bool] = False
    supports_draft_decode_metadata_update: bool = False
    supports_update_block_table: bool = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return cls._cudagraph_support

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        return None

    def use_cascade_attention(self, *args: Any, **named: Any) -> bool:
        return False  # <= 0.31


class DeviceBuildersOwn:
    """:class:`DevicesOwn` for metadata builders."""

    _cudagraph_support: Any = PassedOn()
    get_cudagraph_support: Any = PassedOn()
    get_varlen_cudagraph_max_query_len: Any = PassedOn()
    reorder_batch_threshold: Any = PassedOn()
    requires_block_table_width: Any = PassedOn()
    supports_draft_decode_metadata_update: Any = PassedOn()
    supports_update_block_table: Any = PassedOn()
    use_cascade_attention: Any = PassedOn()
