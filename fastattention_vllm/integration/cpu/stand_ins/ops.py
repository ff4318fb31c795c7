"""Torch stand-ins for the compiled CPU ops that vLLM calls for the models supported here.

Why: the official vLLM installs as pure Python on a CPU-only machine (its CPU extension needs a newer compiler than
Debian 12 has), so ``torch.ops._C`` is empty there. If a vLLM includes the compiled ops, nothing is replaced.
Remove when: vLLM publishes CPU wheels.

The reference for each op's meaning is vLLM's ``csrc/cpu`` and its Python callers, named below; the versions after each
schema are those that call it (0.19.1 to 0.32.0 were read).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import (
    set_num_threads as set_num_threads,  # kept: a CPU worker of vLLM 0.19 replaces the one in torch's namespace
)

from fastattention_vllm.attention.cpu import sampling
from fastattention_vllm.attention.cpu.rotary import rotate
from fastattention_vllm.integration import compat
from fastattention_vllm.integration.cpu.stand_ins import drafting, linear_attention, state_copies
from fastattention_vllm.integration.cpu.stand_ins import moe as cpu_moe
from fastattention_vllm.integration.cpu.stand_ins import speculation as cpu_speculation
from fastattention_vllm.placement.cpus import parse_cpu_list

_library: Any = None  # a torch.library.Library; its methods are untyped
_kernels_replaced = False


def define_missing_ops() -> None:
    """Define each op below in namespace ``_C`` unless the installed vLLM has it. Idempotent."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("_C", "FRAGMENT")
    _define("init_cpu_threads_env(str cpu_ids) -> str", _bind_threads)  # 0.19
    _define("init_cpu_memory_env(int[] node_ids) -> ()", lambda node_ids: None)  # from 0.20
    _define("greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(dim=-1))  # from 0.32
    _define("fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor", _fused_gumbel_argmax)  # from 0.32
    _define(
        "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",  # all; 0.19 without the last two
        _rotary_embedding,
    )
    _define(
        "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
        "Tensor(a!) slot_mapping, int block_size) -> ()",  # up to 0.31; then register_kernel_overrides()
        _compute_slot_mapping,
    )
    # vllm/model_executor/layers/activation.py looks these up on CPUs, and then computes natively: all versions.
    for name, function in (
        ("gelu_new", _gelu_tanh),
        ("gelu_fast", _gelu_tanh),
        ("gelu_quick", _gelu_quick),
        ("silu_and_mul", _silu_and_mul),
        ("gelu_and_mul", _gelu_and_mul),
        ("gelu_tanh_and_mul", _gelu_tanh_and_mul),
    ):
        _define(f"{name}(Tensor(a!) out, Tensor input) -> ()", function)
    _define("prepack_moe_weight(Tensor weight, Tensor(a!) packed, str isa) -> ()", cpu_moe.prepack_moe_weight)
    _define(
        "cpu_fused_moe(Tensor(a!) out, Tensor input, Tensor w13, Tensor w2, Tensor? w13_bias, Tensor? w2_bias, "
        "Tensor topk_weights, Tensor topk_ids, bool skip_weighted, str act, str isa) -> ()",
        cpu_moe.cpu_fused_moe,
    )
    # vLLM calls it for bf16 on CPUs with AVX-512 bf16: model_executor/layers/utils.py
    _define("causal_conv1d_weight_pack(Tensor weight) -> Tensor", linear_attention.pack_convolution)
    if not compat.compiled_cpu_ops_are_loaded() and not compat.has_kernel_dispatcher():
        compat.replace_triton_kernels(cpu_speculation.KERNELS)


def register_kernel_overrides() -> None:
    """Replace Triton kernels, which do not run on CPUs here. Idempotent.

    This is for vLLM >= 0.32, which calls ``Platform.register_triton_kernel_overrides``. For older versions,
    ``define_missing_ops`` does the same.
    """
    global _kernels_replaced
    if compat.has_compiled_cpu_ops() or _kernels_replaced:
        return
    _kernels_replaced = True
    compat.replace_triton_kernels(
        {"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": _slot_mapping}
        | cpu_speculation.KERNELS
        | drafting.KERNELS
        | state_copies.KERNELS
    )


def keep_linears_off_compiled_kernels() -> None:
    """Make vLLM use torch's linear instead of its compiled sgl-kernel, which it uses for small weights on AMX CPUs.

    This replaces a function, because there is no hook. It is for all versions (up to 0.26, only VLLM_CPU_SGL_KERNEL=1
    selects that kernel).
    """
    if compat.has_compiled_cpu_ops():
        return
    from vllm.model_executor.layers import utils as linear_dispatch

    linear_dispatch.check_cpu_sgl_kernel = lambda n, k, dtype: False


def _define(schema: str, function: Callable[..., object]) -> None:
    name = schema.split("(", 1)[0]
    if hasattr(torch.ops._C, name):
        return
    _library.define(schema)
    if "!)" in schema:
        # These ops write in place. torch.compile traces them with tensors without data, so there is nothing to compute.
        _library.impl(name, function, "CPU")
        _library.impl(name, lambda *arguments, **named: None, "Meta")
    else:
        _library.impl(name, function, "CompositeExplicitAutograd")


def _bind_threads(cpu_ids: str) -> str:
    """Run this process's OpenMP threads on ``cpu_ids`` (``0,2-5``). Caller: v1/worker/cpu_worker.py."""
    cpus = parse_cpu_list(cpu_ids)
    where = f"on CPUs {cpu_ids}"
    try:
        os.sched_setaffinity(0, cpus)
    except PermissionError as error:
        where = f"not bound to CPUs, because the system does not allow it ({error.strerror})"
    set_num_threads(len(cpus))
    return f"OpenMP threads: {len(cpus)}, {where}."


def _fused_gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Sample each row of ``logits [n, vocab]`` with its own seed. Caller: v1/sample/ops/topk_topp_sampler.py."""
    return sampling.sample(logits.contiguous(), seeds)


def _gelu_tanh(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(torch.nn.functional.gelu(x, approximate="tanh"))


def _gelu_quick(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(x * torch.sigmoid(1.702 * x))


def _silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _gelu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.gelu(gate) * up)


def _gelu_tanh_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)


def _rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotate ``query`` and ``key`` ``[num_tokens, heads * head_size]`` in place, in fp32.

    Neighbouring halves (``is_neox``), which nearly all models have, are rotated by the kernels, pairs here.

    Caller: vllm/_custom_ops.py ``rotary_embedding``.
    """
    if is_neox:
        given = [query] if key is None else [query, key]
        rows = [states.reshape(positions.numel(), -1) for states in given]
        key_rows = None if key is None else rows[1]
        rotate(
            positions.flatten().long(), rows[0], key_rows, head_size, cos_sin_cache, rope_dim_offset, inverse=inverse
        )
        for original, turned in zip(given, rows, strict=True):
            if turned.data_ptr() != original.data_ptr():  # heads that do not lie next to each other were copied
                original.copy_(turned.view_as(original))
        return
    cos, sin = cos_sin_cache.index_select(0, positions.flatten()).float().chunk(2, dim=-1)
    cos, sin = cos[:, None], (-sin if inverse else sin)[:, None]
    rotary_dim = cos.shape[-1] * 2
    for states in (query, key):
        if states is None:
            continue
        heads = states.view(positions.numel(), -1, head_size)
        part = heads[..., rope_dim_offset : rope_dim_offset + rotary_dim]
        x = part.float()
        first, second = x[..., ::2], x[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
        part.copy_(rotated)


def _slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    block_table_stride: int,
    slot_mapping_ptr: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int = 1,
    TOTAL_CP_RANK: int = 0,
    CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,
    PAD_ID: int = -1,
    BLOCK_SIZE: int = 1024,
) -> None:
    """Each token's slot, for vLLM >= 0.32. Parameter names are the Triton kernel's: vLLM binds by name.

    Reference: v1/worker/block_table.py ``ComputeSlotMappingKernel``. Context parallelism is refused at start.
    """
    _compute_slot_mapping(query_start_loc_ptr, positions_ptr, block_table_ptr, slot_mapping_ptr, KV_CACHE_BLOCK_SIZE)
    slot_mapping_ptr[int(query_start_loc_ptr[-1]) : max_num_tokens].fill_(PAD_ID)


def _compute_slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    """Each token's slot is block id * block size + offset; -1 after the last token.

    Caller up to vLLM 0.31: utils/cpu_triton_utils.py.
    """
    starts = query_start_loc.to(torch.int64)
    total = int(starts[-1])
    requests = torch.repeat_interleave(torch.arange(starts.numel() - 1), starts.diff(), output_size=total)
    positions = positions[:total]
    blocks = block_table[requests, positions // block_size].to(torch.int64)
    slot_mapping[:total] = blocks * block_size + positions % block_size
    slot_mapping[total:].fill_(-1)
