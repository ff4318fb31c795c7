"""A torch stand-in for vLLM's operator of Gated DeltaNet layers (Qwen3-Next, Qwen3.5) on CPUs.

Why: vLLM's operator calls compiled kernels that a pure-Python vLLM lacks, and takes bf16 only. This one takes all
dtypes and computes in fp32. It is written for exactness and is slow: about 15 times the compiled operator's time.
Remove when: vLLM publishes CPU wheels, and its operator takes fp32 and fp16.
Reference: ``vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py`` of 0.32.0.
"""

from __future__ import annotations

import ctypes
import typing
from typing import Any

import torch
from torch.nn import functional

from fastattention_vllm.integration.cpu.stand_ins import delta_rule


def replace_operator() -> None:
    """Must be called before the first layer is created, because its creation registers the operator. Idempotent."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    # torch derives the operator's schema from the annotations, and knows no NoneType.
    _operator.__annotations__ = typing.get_type_hints(gdn_attention.cpu_gdn_attention_core) | {"return": None}
    gdn_attention.cpu_gdn_attention_core = _operator


def pack_convolution(weight: torch.Tensor) -> torch.Tensor:
    """Copy the weights ``[channels, width]`` unchanged. The compiled kernels reorder them, torch does not."""
    return weight[:, None].clone()


def copy_states(src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor, BLOCK_SIZE: int = 0) -> None:
    """Copy ``sizes`` bytes between addresses. Parameter names are the Triton kernel's.

    Caller: v1/worker/mamba_utils.py, when a request with prefix caching enters another block.
    """
    for source, target, size in zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

KERNELS = {"vllm.v1.worker.mamba_utils.batch_memcpy_kernel": copy_states}


def _operator(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, layer_name: Any) -> None:
    """``mixed_qkv [tokens, channels]``, ``b`` and ``a [tokens, V heads]``, ``core_attn_out [tokens, V heads, V]``.

    Requests that decode one token come first, then those that compute part of their prompt.
    """
    from vllm.forward_context import get_forward_context
    from vllm.utils import torch_utils

    context: Any = get_forward_context()
    layer = context.no_compile_layers[torch_utils._resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # vLLM's profiling and warm-up runs
        return
    metadata = context.attn_metadata[layer.prefix]
    assert metadata.spec_sequence_masks is None, "speculation with these layers is refused at start"
    if metadata.num_actual_tokens == 0:
        return
    computes = _Layer(layer)
    slots = metadata.non_spec_state_indices_tensor
    decodes = metadata.num_decodes
    if decodes:
        core_attn_out[:decodes] = computes.decode(mixed_qkv[:decodes], b[:decodes], a[:decodes], slots[:decodes].long())
    starts = metadata.non_spec_query_start_loc.tolist()
    for request in range(decodes, decodes + metadata.num_prefills):
        rows = slice(starts[request], starts[request + 1])
        begun = bool(metadata.has_initial_state[request])
        core_attn_out[rows] = computes.prefill(mixed_qkv[rows], b[rows], a[rows], int(slots[request]), begun)


class _Layer:
    """One layer's weights on this rank, and its states."""

    def __init__(self, layer: Any) -> None:
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

        ranks = layer.tp_size
        self.key_heads, self.value_heads = layer.num_k_heads // ranks, layer.num_v_heads // ranks
        self.sizes = (layer.key_dim // ranks, layer.key_dim // ranks, layer.value_dim // ranks)
        self.weight = layer.conv1d.weight.view(layer.conv1d.weight.shape[0], -1)
        self.bias = layer.conv1d.bias
        self.activation = functional.silu if layer.activation in ("silu", "swish") else lambda x: x
        self.rate, self.dt_bias = -layer.A_log.float().exp(), layer.dt_bias.float()
        inputs, self.states = layer.kv_cache  # the last width - 1 inputs of the convolution, and S
        self.inputs = inputs if is_conv_state_dim_first() else inputs.transpose(1, 2)
        # vLLM names the last two dimensions V and K, but CPU operators store K rows of V.
        slots, heads, value_size, key_size = self.states.shape
        self.states = self.states.view(slots, heads, key_size, value_size)

    def decode(self, x: torch.Tensor, b: torch.Tensor, a: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        inputs, matrices = self.inputs, self.states
        before = inputs[slots]
        inputs[slots] = torch.cat([before, x[..., None].to(before.dtype)], dim=-1)[..., 1:]
        convolved = delta_rule.convolve(x[:, None], before, self.weight, self.bias)[:, 0]
        out, after = delta_rule.recurrent(*self._heads(convolved, b, a), matrices[slots].float())
        matrices[slots] = after.to(matrices.dtype)
        return out.to(x.dtype)

    def prefill(self, x: torch.Tensor, b: torch.Tensor, a: torch.Tensor, slot: int, begun: bool) -> torch.Tensor:
        """``begun``: the slot holds the state after the prompt's earlier tokens; otherwise its content is old."""
        inputs, state = self.inputs[slot], self.states[slot]
        if not begun:
            inputs.zero_()
            state.zero_()
        convolved = delta_rule.convolve(x[None], inputs[None], self.weight, self.bias)[0]
        inputs.copy_(torch.cat([inputs, x.T.to(inputs.dtype)], dim=-1)[:, -inputs.shape[-1] :])
        out, after = delta_rule.chunked(*self._heads(convolved, b, a), state.float())
        state.copy_(after)
        return out.to(x.dtype)

    def _heads(self, convolved: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> Heads:
        """Queries, keys, values, decay and rate of every V head."""
        tokens, repeats = len(convolved), self.value_heads // self.key_heads
        query, key, value = self.activation(convolved).split(self.sizes, dim=-1)
        query, key = (
            delta_rule.normalise(part.reshape(tokens, self.key_heads, -1)).repeat_interleave(repeats, 1)
            for part in (query, key)
        )
        decay = self.rate * functional.softplus(a.float() + self.dt_bias)
        value = value.reshape(tokens, self.value_heads, -1)
        return query * query.shape[-1] ** -0.5, key, value, decay, b.float().sigmoid()
