"""Reads from vLLM's configuration which layers have a KV cache, and its size."""

from __future__ import annotations

from collections.abc import Sequence
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
    kinds = (getattr(text, "layer_types", None) or ["sliding_attention"] * layers)[:layers]
    has_window = [bool(_window(vllm_config)) and "sliding" in kind for kind in kinds]
    full, windowed = as_grouped(
        tuple(index for index in range(layers) if not has_window[index]),
        tuple(index for index in range(layers) if has_window[index]),
        vllm_config,
    )
    # The last layers of the model share the cache of the last unshared layer of their kind.
    fixed = frozenset(kind[-1] for kind in (full, windowed) if kind) if shared else frozenset()
    return Layers(full, windowed, fixed)


def full_attention_layers(kinds: Sequence[str]) -> tuple[int, ...]:
    """The layers of a hybrid model that attend to all tokens. The others keep a state of constant size."""
    return tuple(index for index, kind in enumerate(kinds) if kind == "full_attention")


def as_grouped(
    full: tuple[int, ...], windowed: tuple[int, ...], vllm_config: VllmConfig
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of the layers that keep whole sequences, and of those that keep a window.

    With --disable-hybrid-kv-cache-manager, both kinds share one block table, which keeps whole sequences.
    """
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager and full:
        return tuple(sorted((*full, *windowed))), ()
    return full, windowed


def _window(vllm_config: VllmConfig) -> int:
    model = vllm_config.model_config
    # A model that alternates without naming its windowed layers is treated as a model without windows.
    unsaid = getattr(model.hf_text_config, "interleaved_sliding_window", None)
    return 0 if unsaid else model.get_sliding_window() or 0


def kv_size_of(vllm_config: VllmConfig) -> KvSize:
    # Imported late: this vLLM module (seen in 0.28) resolves the platform on import, which imports this module.
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    layers = layers_of(vllm_config)
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
        window=_window(vllm_config),
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
