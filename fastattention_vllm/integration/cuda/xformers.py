"""``volta_fallback: xformers``: an optional backend for models that the Volta kernels refuse.

Not yet run on a V100. It gathers keys and values from their pages in every step, and does not support CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf

from fastattention_vllm.attention import pages, xformers
from fastattention_vllm.attention.volta.launch import HEAD_SIZES
from fastattention_vllm.integration import compat
from fastattention_vllm.integration.base import Backend, Layer
from fastattention_vllm.integration.claims import BuilderClaims
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.tiling.attention_rows import one_causality

logger = init_logger("vllm.fastattention")

ASK = """--additional-config '{"fastattention": {"volta_fallback": "xformers"}}'"""
SOFT_CAPPED = ("gemma2",)
"""Model types with a soft cap that do not run in float16. xformers does not support soft caps."""


def why_volta_refuses(vllm_config: Any) -> str | None:
    """The property of the model that the Volta kernels refuse and xformers may support, or None."""
    model = getattr(vllm_config, "model_config", None)
    if model is None or getattr(model, "use_mla", False):
        return None
    if model.dtype == torch.float32:
        return "the model's dtype is float32, but the Volta kernels need float16"
    head_size = model.get_head_size()
    if head_size not in HEAD_SIZES:
        return f"the model's head size is {head_size}, but the Volta kernels support {', '.join(map(str, HEAD_SIZES))}"
    return None


def check_asked(vllm_config: Any, reason: str) -> None:
    """Check that xformers may run the model, which the Volta kernels refuse for ``reason``.

    Raises:
        Refusal: xformers is not selected or not installed, or conflicts with another option.
    """
    options = options_of(vllm_config)
    half = "pass --dtype float16, or" if "dtype" in reason else "serve another model, or"
    if options.volta_fallback is None:
        model_type = _model_type(vllm_config)
        if "dtype" in reason and compat.refuses_float16(model_type):
            raise Refusal(
                f"{reason}, and model type {model_type!r} does not run in float16, because it is numerically unstable "
                f"there; {instead_of_float16(model_type)}."
            )
        raise Refusal(f"{reason}; {half} install xformers and pass {ASK} to run the model with it, more slowly.")
    if xformers.version() is None:
        raise Refusal(
            f'volta_fallback is "xformers", but xformers is not installed; install the release for torch '
            f"{torch.__version__}, or remove the option."
        )
    if options.host_kv_layers not in ("auto", 0, []):
        raise Refusal(
            f"host_kv_layers is {options.host_kv_layers}, but volta_fallback keeps all KV on the GPU, and it is in use "
            f"because {reason}; remove host_kv_layers."
        )


def instead_of_float16(model_type: str) -> str:
    """What to do about a model type for which vLLM refuses float16, on a GPU without bfloat16."""
    serve = "serve a model that runs in float16 (Llama, Qwen2.5, Qwen3, Mistral)"
    if model_type in SOFT_CAPPED:
        return serve
    return (
        f"{serve}, or install xformers and pass --dtype float32 and {ASK}, which is slower and takes twice the memory"
    )


def _model_type(vllm_config: Any) -> str:
    return str(getattr(getattr(vllm_config.model_config, "hf_config", None), "model_type", ""))


class FastAttentionXformersBackend(Backend):
    """``--attention-backend fastattention`` for such models with ``volta_fallback: xformers``."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(xformers.DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16"]

    @staticmethod
    def get_impl_cls() -> type[Layer]:
        return FastAttentionXformersImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return XformersMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability >= (7, 0))

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % xformers.HEAD_SIZE_MULTIPLE == 0

    @classmethod
    def supports_sink(cls) -> bool:
        return False


@dataclass
class XformersMetadata:
    """One step's batch."""

    q_lens: list[int]
    kv_lens: list[int]
    places: tuple[torch.Tensor, torch.Tensor]
    """Block and row of every KV token, sequence by sequence."""
    causal: bool
    masks: dict[int, Any] = field(default_factory=dict)

    def mask(self, window: int, of_cache: bool) -> Any:
        """The mask for all layers with this window. Without ``of_cache``, the keys are this step's tokens."""
        if window not in self.masks:
            kv_lens = self.kv_lens if of_cache else self.q_lens
            self.masks[window] = xformers.bias(self.q_lens, kv_lens, causal=self.causal, window=window)
        return self.masks[window]


class XformersMetadataBuilder(BuilderClaims, AttentionMetadataBuilder[Any]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page = int(kv_cache_spec.block_size)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> XformersMetadata:
        common = common_attn_metadata
        causal = one_causality(common.causal)
        seqs = common.num_reqs
        starts = common.query_start_loc_cpu[: seqs + 1]
        kv_lens = common.seq_lens[:seqs].tolist()
        where = pages.places(common.block_table_tensor[:seqs], kv_lens, self.page)
        return XformersMetadata(torch.diff(starts).tolist(), kv_lens, where, causal)


class FastAttentionXformersImpl(Layer):
    """One attention layer that runs with xformers."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        asked = [
            name
            for name, wanted in (
                ("a soft cap", self.softcap > 0),
                ("ALiBi", self.alibi_slopes is not None),
                ("attention sinks", self.sinks is not None),
                ("a window on both sides", self.is_encoder and self.window[0] >= 0),
            )
            if wanted
        ]
        if asked:
            raise Refusal(
                f"this model's attention layers use {', '.join(asked)}, which volta_fallback: xformers does not "
                "support; serve another model."
            )

    @property
    def kernels_name(self) -> str:
        return f"xformers {xformers.version()}"

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is None:  # vLLM up to 0.23 loads weights again without one; what follows is done by then
            return
        logger.info_once(
            "Attention kernels: xformers %s, selected by volta_fallback because %s.",
            xformers.version(),
            why_volta_refuses(vllm_config),
        )

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if self.is_encoder:
            return
        real = slot_mapping >= 0
        slots, tokens = slot_mapping[real], len(slot_mapping)
        for cache, new in zip(compat.split_kv_cache(kv_cache, self.head_size), (key, value), strict=True):
            page = cache.shape[1]
            cache[slots // page, slots % page] = new[:tokens][real]

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
        metadata: XformersMetadata = attn_metadata
        tokens = sum(metadata.q_lens)
        if self.is_encoder:
            key, value = key[:tokens], value[:tokens]
        else:
            key, value = (part[metadata.places] for part in compat.split_kv_cache(kv_cache, self.head_size))
        mask = metadata.mask(self.window[0], of_cache=not self.is_encoder)
        output[:tokens] = xformers.attend(query[:tokens], key, value, mask, self.scale)
        return output

    def why_not_on_host(self) -> str | None:
        return "volta_fallback"
