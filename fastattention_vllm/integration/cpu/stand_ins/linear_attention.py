"""A stand-in for vLLM's operator of Gated DeltaNet layers (Qwen3-Next, Qwen3.5) on CPUs.

Why: vLLM's operator calls compiled kernels that a pure-Python vLLM lacks, and takes bf16 only. This one calls the
kernels of ``attention/cpu/gated_delta.py``, which take all dtypes and compute in fp32.
Remove when: vLLM publishes CPU wheels, and its operator takes fp32 and fp16.
Reference: ``vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py`` of 0.32.0.
"""

from __future__ import annotations

import typing
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fastattention_vllm.attention.cpu.gated_delta import GatedDeltaLayer

_layers: MutableMapping[torch.Tensor, GatedDeltaLayer] = WeakIdKeyDictionary()
"""From the weight of a layer's convolution to its kernels, with parameters converted once per load."""


def replace_operator() -> None:
    """Must be called before the first layer is created, because its creation registers the operator. Idempotent."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    from fastattention_vllm.integration.cpu.stand_ins import gated_norm

    # torch derives the operator's schema from the annotations, and knows no NoneType.
    _operator.__annotations__ = typing.get_type_hints(gdn_attention.cpu_gdn_attention_core) | {"return": None}
    gdn_attention.cpu_gdn_attention_core = _operator
    gated_norm.register()


def pack_convolution(weight: torch.Tensor) -> torch.Tensor:
    """Copy the weights ``[channels, width]`` unchanged. vLLM's compiled kernels reorder them, ours do it themselves."""
    return weight[:, None].clone()


def _operator(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, layer_name: Any) -> None:
    """``mixed_qkv [tokens, channels]``, ``b`` and ``a [tokens, V heads]``, ``core_attn_out [tokens, V heads, V]``.

    Without draft tokens, requests that decode one token come first, then those that compute part of their prompt.
    """
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.utils import torch_utils

    context: Any = get_forward_context()
    layer = context.no_compile_layers[torch_utils._resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # vLLM's profiling and warm-up runs
        return
    metadata = context.attn_metadata[layer.prefix]
    if metadata.num_actual_tokens == 0:
        return
    if metadata not in _batches:
        _batches[metadata] = _batch(metadata)
    batch = _batches[metadata]
    inputs, states = layer.kv_cache
    if is_conv_state_dim_first():
        inputs = inputs.transpose(1, 2)
    # vLLM names the last two dimensions V and K, but CPU operators store K rows of V.
    slots, heads, value_size, key_size = states.shape
    _kernels(layer).run(
        mixed_qkv,
        a,
        b,
        core_attn_out,
        batch.query_start_loc,
        batch.slots,
        batch.begun,
        inputs,
        states.view(slots, heads, key_size, value_size),
        batch.verified,
        batch.state_slots,
    )


@dataclass(frozen=True)
class _Batch:
    """A step's requests, in the order of their tokens; ``GatedDeltaLayer.run`` describes the tensors."""

    query_start_loc: torch.Tensor
    slots: torch.Tensor
    begun: torch.Tensor
    verified: torch.Tensor | None = None
    state_slots: torch.Tensor | None = None


_batches: MutableMapping[Any, _Batch] = WeakIdKeyDictionary()
"""From vLLM's metadata, which the layers with the same block table share."""


def _batch(metadata: Any) -> _Batch:
    """The step that ``GDNAttentionMetadata`` describes. It separates requests with draft tokens from others."""
    decodes, others = metadata.num_decodes, metadata.num_decodes + metadata.num_prefills
    begun = torch.ones(others, dtype=torch.bool)
    if metadata.num_prefills:
        begun[decodes:] = metadata.has_initial_state[decodes:others]
    if metadata.spec_sequence_masks is None:
        starts, slots = metadata.non_spec_query_start_loc, metadata.non_spec_state_indices_tensor
        return _Batch(starts[: others + 1].int(), slots[:others].int().contiguous(), begun)
    drafting = metadata.num_spec_decodes
    has_drafts = metadata.spec_sequence_masks[: drafting + others]
    state_slots = torch.zeros(len(has_drafts), metadata.spec_state_indices_tensor.shape[1], dtype=torch.int32)
    state_slots[has_drafts] = metadata.spec_state_indices_tensor[:drafting].int()
    verified, lengths = (torch.zeros(len(has_drafts), dtype=torch.int32) for _ in range(2))
    verified[has_drafts] = metadata.num_accepted_tokens[:drafting].int()
    lengths[has_drafts] = metadata.spec_query_start_loc[: drafting + 1].int().diff()
    all_begun = has_drafts.clone()
    if others:
        state_slots[~has_drafts, 0] = metadata.non_spec_state_indices_tensor[:others].int()
        lengths[~has_drafts] = metadata.non_spec_query_start_loc[: others + 1].int().diff()
        all_begun[~has_drafts] = begun
    starts = torch.zeros(len(has_drafts) + 1, dtype=torch.int32)
    starts[1:] = lengths.cumsum(0)
    return _Batch(starts, state_slots[:, 0].contiguous(), all_begun, verified, state_slots)


def _kernels(layer: Any) -> GatedDeltaLayer:
    """The kernels of a layer's part on this rank, with its parameters of now: they may be loaded again, in place."""
    weight = layer.conv1d.weight
    parameters = (weight.view(len(weight), -1), layer.conv1d.bias, layer.A_log, layer.dt_bias)
    known = _layers.get(weight)
    if known is None or not known.has(*parameters):
        key_heads, value_heads = layer.num_k_heads // layer.tp_size, layer.num_v_heads // layer.tp_size
        known = _layers[weight] = GatedDeltaLayer(
            *parameters,
            key_heads=key_heads,
            value_heads=value_heads,
            key_size=layer.key_dim // layer.num_k_heads,
            value_size=layer.value_dim // layer.num_v_heads,
            activation=layer.activation,
        )
    return known
