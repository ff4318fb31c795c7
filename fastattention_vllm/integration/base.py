"""Base classes of this package's own backends: CPUs, GPUs below compute capability 8.0, and xformers.

The backends for newer GPUs and for NPUs derive from the backends of vLLM and vllm-ascend instead.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.integration import compat, support
from fastattention_vllm.integration.claims import BackendClaims, ImplClaims
from fastattention_vllm.integration.refusal import Refusal


class Backend(BackendClaims, compat.BackendMembers, AttentionBackend):
    """``--attention-backend fastattention``: answers vLLM's questions before it builds any layer.

    A device's backend adds its dtypes, head sizes, block sizes and compute capabilities, its layers and its builder.
    """

    @staticmethod
    def get_name() -> str:
        return compat.BACKEND_NAME

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in support.ATTENTION_TYPES

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True


class Layer(ImplClaims, AttentionImpl[Any]):
    """The parameters of one attention layer, which together with a batch form an :class:`AttentionProblem`.

    Subclasses add the methods that vLLM calls: ``process_weights_after_loading``, ``do_kv_cache_update``, ``forward``.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **features: Any,
    ) -> None:
        # The start-up check sees only the model's config. A layer may still need more, and is then refused here.
        unsupported = {
            f"attention type {AttentionType(attn_type).value}": attn_type not in support.ATTENTION_TYPES,
            f"KV cache dtype {kv_cache_dtype}": kv_cache_dtype not in support.KV_CACHE_DTYPES,
        } | {name: value is not None and value is not False for name, value in features.items()}
        asked = [name for name, wanted in unsupported.items() if wanted]
        if asked:
            raise Refusal(
                f"this model's attention layers use {', '.join(asked)}, which fastattention does not support; "
                "serve another model."
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.fp8 = support.FP8_CACHES.get(kv_cache_dtype)
        if self.fp8 is not None:  # scales are loaded later
            compat.keep_scales_of_kv_cache()
        self.softcap = logits_soft_cap or 0.0
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        # This is the layer's own parameter, because its weights are loaded later and may be reloaded.
        self.sinks = sinks
        self.is_encoder = attn_type == AttentionType.ENCODER_ONLY
        # vLLM's window includes the token itself; the kernels count the tokens on either side of it.
        reach = -1 if sliding_window is None else sliding_window - 1
        self.window = (reach, reach if self.is_encoder else -1)
        self.host_window = None if sliding_window is None else reach
        # vLLM skips the cache update of such a layer, and binds the other layer's cache to it.
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def split(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Like :meth:`halves`, but in the dtype of the cache's content (vLLM allocates fp8 caches as uint8)."""
        return self.halves(kv_cache if self.fp8 is None else kv_cache.view(self.fp8))

    def halves(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V, each ``[num_blocks, block_size, num_kv_heads, head_size]``, side by side for each token."""
        return compat.split_kv_cache(kv_cache, self.head_size)

    def scales(self, layer: Any) -> tuple[float, float]:
        """The scales by which keys and values in the cache were divided. Reloading weights may change them."""
        return (1.0, 1.0) if self.fp8 is None else (layer._k_scale_float, layer._v_scale_float)

    def problem(self, layer: Any, **parts: Any) -> AttentionProblem:
        """A problem with this layer's scale, mask and so on. ``parts`` are the batch's tensors, or override fields."""
        scales = (1.0, 1.0) if self.is_encoder else self.scales(layer)
        sinks = self.float_sinks()
        own: dict[str, Any] = {
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes,
            # Weights are on the device, but the CPU's part of a host layer is computed here.
            "sinks": None if sinks is None else sinks.to(parts["query"].device),
            "key_scale": scales[0],
            "value_scale": scales[1],
        }
        return AttentionProblem(**(own | parts))

    def float_sinks(self) -> torch.Tensor | None:
        return None if self.sinks is None else self.sinks.detach().float()

    def merges(self) -> bool:
        """Whether attention over parts of the keys can be merged into the exact result, as host layers do."""
        return self.alibi_slopes is None and self.fp8 is None

    def cache_dtype(self, kv_cache: torch.Tensor) -> torch.dtype:
        return self.fp8 or kv_cache.dtype

    def why_not_on_host(self) -> str | None:
        return None
