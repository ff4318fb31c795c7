"""Reads from vLLM's configuration which layers have a KV cache, its size, and what vLLM groups the layers by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastattention_vllm.integration import compat, drafter
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.placement.kv_size import KvSize, host_token_bytes
from fastattention_vllm.placement.plan import Layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def layers_of(vllm_config: VllmConfig) -> Layers:
    """The layers with a separate KV cache, as far as the model's configuration shows."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text: Any = model.hf_text_config
    shared = getattr(text, "num_kv_shared_layers", None) or 0
    layers = model.get_num_layers_by_block_type(parallel) - shared
    if model.attn_type == "encoder_only":
        layers = 0
    if model.is_hybrid:
        return Layers(full_attention_layers(text.layer_types))
    windows = dict(enumerate(_windows(vllm_config, layers)))
    # The last layers of the model share the cache of the last unshared layer of their kind.
    last = {window: index for index, window in windows.items()}
    return as_grouped(windows, last.values() if shared else (), vllm_config)


def full_attention_layers(kinds: Sequence[str]) -> tuple[int, ...]:
    """The layers of a hybrid model that attend to all tokens. The others keep a state of constant size."""
    return tuple(index for index, kind in enumerate(kinds) if kind == "full_attention")


def as_grouped(windows: Mapping[int, int | None], fixed: Iterable[int], vllm_config: VllmConfig) -> Layers:
    """The layers by kind, as vLLM groups their KV caches.

    With --disable-hybrid-kv-cache-manager, all kinds share the block table of the layers without a window.

    Args:
        windows: the number of tokens that each layer sees, by index; None: all.
        fixed: the layers whose cache others share.
        vllm_config: says whether kinds are kept apart.
    """
    full = tuple(sorted(index for index, window in windows.items() if window is None))
    lengths = {index: window for index, window in sorted(windows.items()) if window is not None}
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager and full:
        return Layers(tuple(sorted(windows)), fixed=frozenset(fixed), promoted=frozenset(lengths))
    return Layers(full, tuple(lengths), frozenset(fixed), tuple(lengths.values()))


def window_of(spec: Any) -> int | None:
    """The number of tokens for which vLLM keeps the keys and values of a layer with this KV cache spec; None: all.

    Raises:
        ValueError: the spec is of another kind; the message says of which.
    """
    # Imported late, as in kv_size_of.
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    if type(spec) is FullAttentionSpec:
        return None
    if type(spec) is SlidingWindowSpec:
        window: int = spec.sliding_window
        return window
    raise ValueError(f"has a KV cache of the kind {type(spec).__name__}")


def whole_spec(spec: Any) -> Any:
    """What vLLM groups layers by: their spec, apart from the size of blocks, which it adapts."""
    return replace(spec, block_size=1, page_size_padded=None)


def rows_of(spec: Any) -> tuple[Any, ...]:
    """What a layer with this spec stores of each token."""
    return tuple(getattr(spec, name, None) for name in ("num_kv_heads", "head_size", "dtype", "kv_quant_mode"))


def _windows(vllm_config: VllmConfig, layers: int) -> list[int | None]:
    """The window of each layer, as vLLM's models read it from config.json."""
    text: Any = vllm_config.model_config.hf_text_config
    window = vllm_config.model_config.get_sliding_window() or None
    if window and text.model_type in SEES_ONE_MORE:
        window += 1
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * layers
    listed = getattr(text, "interleaved_sliding_window", None) or getattr(text, "sliding_windows", None)
    if isinstance(listed, (list, tuple)):  # openPangu repeats a list; the others name each layer
        found = [listed[index % len(listed)] or None for index in range(layers)]
    else:  # a model that alternates without naming its windowed layers is treated as a model without windows
        found = [None if listed else window] * layers
    return [one if "sliding" in kind else None for one, kind in zip(found, kinds, strict=False)]


SEES_ONE_MORE = ("cohere2", "cohere2_moe")
"""Models of which a windowed layer sees one token more than sliding_window says (in vLLM 0.19.1 as many)."""


def kv_size_of(vllm_config: VllmConfig, layers: Layers | None = None) -> KvSize:
    """The size of the KV cache of all layers, as if none was on the host.

    ``layers``: those of the model, once it exists; None: what its configuration shows.
    """
    # Imported late: this vLLM module (seen in 0.28) resolves the platform on import, which imports this module.
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    layers = layers_of(vllm_config) if layers is None else layers
    state_layers, state_blocks = _states(vllm_config)
    dtype = kv_cache_dtype_str_to_dtype(cache.cache_dtype, model)
    heads = model.get_num_kv_heads(parallel)
    drafts = drafter.num_layers(vllm_config)
    equal = not drafts or drafter.has_equal_layers(vllm_config)
    host_dtype = options_of(vllm_config).host_kv_dtype
    return KvSize(
        block_size=cache.block_size,
        bytes_per_block=2 * cache.block_size * heads * model.get_head_size() * dtype.itemsize,
        full_layers=len(layers.full),
        windowed_layers=len(layers.windowed),
        window=max(layers.windows, default=0),
        windows=layers.windows if len(set(layers.windows)) > 1 else (),
        tokens_per_step=compat.max_tokens_in_flight(vllm_config),
        state_layers=state_layers,
        state_blocks=state_blocks,
        # vLLM puts layers of equal size into the model's block tables. Others share its only table.
        draft_layers=drafts if equal else 0,
        draft_bytes=0 if equal else cache.block_size * drafter.bytes_per_token(vllm_config, dtype.itemsize),
        host_bytes_per_block=None
        if host_dtype == "auto"
        else cache.block_size * heads * host_token_bytes(model.get_head_size(), host_dtype),
    )


def _states(vllm_config: VllmConfig) -> tuple[int, int]:
    """The number of linear-attention layers, and of states that each keeps for a request.

    Besides the current state, a request keeps one per speculated token, and with prefix caching the one at the end of
    the last block.
    """
    model: Any = vllm_config.model_config
    if not model.is_hybrid:
        return 0, 0
    kinds = model.hf_text_config.layer_types
    cached = vllm_config.cache_config.mamba_cache_mode == "align"
    drafts = drafter.drafts_per_request(vllm_config)
    return len(kinds) - len(full_attention_layers(kinds)), 1 + cached + drafts
