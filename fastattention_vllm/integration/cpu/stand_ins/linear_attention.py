"""A stand-in for vLLM's operator of Gated DeltaNet layers (Qwen3-Next, Qwen3.5) on CPUs.

Why: vLLM's operator calls compiled kernels that a pure-Python vLLM lacks, and takes bf16 only. This one calls the
kernels of ``attention/cpu/gated_delta.py``, which take all dtypes and compute in fp32.
Remove when: vLLM publishes CPU wheels, and its operator takes fp32 and fp16.
Reference: ``vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py`` of 0.32.0.
"""

from __future__ import annotations

import ctypes
import typing
from collections.abc import MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fastattention_vllm.attention.cpu.gated_delta import GatedDeltaLayer

_layers: MutableMapping[torch.Tensor, GatedDeltaLayer] = WeakIdKeyDictionary()
"""From the weight of a layer's convolution to its kernels, with parameters converted once."""


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


def copy_states(src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor, BLOCK_SIZE: int = 0) -> None:
    """Copy ``sizes`` bytes between addresses. Parameter names are the Triton kernel's.

    Caller: v1/worker/mamba_utils.py, when a request with prefix caching enters another block.
    """
    for source, target, size in zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


KERNELS = {"vllm.v1.worker.mamba_utils.batch_memcpy_kernel": copy_states}


def _operator(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, layer_name: Any) -> None:
    """``mixed_qkv [tokens, channels]``, ``b`` and ``a [tokens, V heads]``, ``core_attn_out [tokens, V heads, V]``.

    Requests that decode one token come first, then those that compute part of their prompt.
    """
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.utils import torch_utils

    context: Any = get_forward_context()
    layer = context.no_compile_layers[torch_utils._resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # vLLM's profiling and warm-up runs
        return
    metadata = context.attn_metadata[layer.prefix]
    assert metadata.spec_sequence_masks is None, "speculation with these layers is refused at start"
    if metadata.num_actual_tokens == 0:
        return
    decodes, requests = metadata.num_decodes, metadata.num_decodes + metadata.num_prefills
    begun = torch.ones(requests, dtype=torch.bool)
    if metadata.num_prefills:
        begun[decodes:] = metadata.has_initial_state[decodes:requests]
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
        metadata.non_spec_query_start_loc[: requests + 1].int(),
        metadata.non_spec_state_indices_tensor[:requests].int(),
        begun,
        inputs,
        states.view(slots, heads, key_size, value_size),
    )


def _kernels(layer: Any) -> GatedDeltaLayer:
    """The kernels of a layer's part on this rank."""
    weight = layer.conv1d.weight
    if weight not in _layers:
        key_heads, value_heads = layer.num_k_heads // layer.tp_size, layer.num_v_heads // layer.tp_size
        _layers[weight] = GatedDeltaLayer(
            weight.view(len(weight), -1),
            layer.conv1d.bias,
            layer.A_log,
            layer.dt_bias,
            key_heads=key_heads,
            value_heads=value_heads,
            key_size=layer.key_dim // layer.num_k_heads,
            value_size=layer.value_dim // layer.num_v_heads,
            activation=layer.activation,
        )
    return _layers[weight]
