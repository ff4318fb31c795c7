"""Torch stand-ins for the few compiled CPU ops that vLLM's dense decoder path calls.

Why: the official vLLM installs as pure Python on a CPU-only machine (its CPU extension needs a newer compiler than
Debian 12 has), so ``torch.ops._C`` is empty there. Where a vLLM brings the compiled ops, nothing is replaced.
Remove when: vLLM publishes CPU wheels.

Serves vLLM 0.32; the reference for each op's meaning is vLLM's ``csrc/cpu`` and its Python callers, named below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastattention_vllm.integration import cpu_moe, cpu_speculation

_library: Any = None  # a torch.library.Library; its methods are untyped
_compiled_vllm: bool | None = None
_kernels_replaced = False


def has_compiled_vllm_ops() -> bool:
    """Whether this vLLM came with its own CPU kernels."""
    if _compiled_vllm is None:
        import vllm._custom_ops  # noqa: F401  its import loads the kernels, through the platform's import_kernels
    return bool(_compiled_vllm)


def define_missing_ops() -> None:
    """Define each op below in namespace ``_C`` unless the installed vLLM has it. Idempotent."""
    global _library, _compiled_vllm
    if _library is not None:
        return
    _compiled_vllm = hasattr(torch.ops._C, "cpu_attention_with_kv_cache")
    _library = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
    _define("init_cpu_memory_env(int[] node_ids) -> ()", lambda node_ids: None)
    _define("greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(dim=-1))
    _define("fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor", _fused_gumbel_argmax)
    _define(
        "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
        _rotary_embedding,
    )
    # vllm/model_executor/layers/activation.py looks these up on CPUs, and then computes natively.
    for name, function in (
        ("gelu_new", _gelu_tanh),
        ("gelu_fast", _gelu_tanh),
        ("gelu_quick", _gelu_quick),
    ):
        _define(f"{name}(Tensor(a!) out, Tensor input) -> ()", function)
    _define("prepack_moe_weight(Tensor weight, Tensor(a!) packed, str isa) -> ()", cpu_moe.prepack_moe_weight)
    _define(
        "cpu_fused_moe(Tensor(a!) out, Tensor input, Tensor w13, Tensor w2, Tensor? w13_bias, Tensor? w2_bias, "
        "Tensor topk_weights, Tensor topk_ids, bool skip_weighted, str act, str isa) -> ()",
        cpu_moe.cpu_fused_moe,
    )


def register_kernel_overrides() -> None:
    """Keep a worker off kernels that are not there: Triton's (none for CPUs here) and vLLM's own. Idempotent."""
    global _kernels_replaced
    if has_compiled_vllm_ops() or _kernels_replaced:
        return
    _kernels_replaced = True
    from vllm.model_executor.layers import utils as linear_dispatch
    from vllm.triton_utils.dispatcher import register_kernels

    register_kernels(
        {"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": _slot_mapping} | cpu_speculation.KERNELS
    )
    # On a CPU with AMX, small weights would go to the compiled sgl-kernel; False leads to torch's own linear.
    linear_dispatch.check_cpu_sgl_kernel = lambda n, k, dtype: False


def _define(schema: str, function: Callable[..., object]) -> None:
    name = schema.split("(", 1)[0]
    if hasattr(torch.ops._C, name):
        return
    _library.define(schema)
    if "!)" in schema:
        # Writes in place. torch.compile traces with tensors that have no data: nothing to compute or to branch on.
        _library.impl(name, function, "CPU")
        _library.impl(name, lambda *arguments, **named: None, "Meta")
    else:
        _library.impl(name, function, "CompositeExplicitAutograd")


def _fused_gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Sample each row of ``logits [n, vocab]`` with its own seed. Caller: v1/sample/ops/topk_topp_sampler.py."""
    noise = torch.empty_like(logits)
    for row, seed in zip(noise, seeds.tolist(), strict=True):
        row.exponential_(generator=torch.Generator().manual_seed(seed))
    return (logits.softmax(dim=-1) / noise).argmax(dim=-1)


def _gelu_tanh(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(torch.nn.functional.gelu(x, approximate="tanh"))


def _gelu_quick(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(x * torch.sigmoid(1.702 * x))


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

    Caller: vllm/_custom_ops.py ``rotary_embedding``.
    """
    cos, sin = cos_sin_cache.index_select(0, positions.flatten()).float().chunk(2, dim=-1)
    cos, sin = cos[:, None], (-sin if inverse else sin)[:, None]
    rotary_dim = cos.shape[-1] * 2
    for states in (query, key):
        if states is None:
            continue
        heads = states.view(positions.numel(), -1, head_size)
        part = heads[..., rope_dim_offset : rope_dim_offset + rotary_dim]
        x = part.float()
        if is_neox:
            first, second = x.chunk(2, dim=-1)
            rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        else:
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
    """Each token's slot = block id * block size + offset. Parameter names are the Triton kernel's: vLLM binds by name.

    Reference: v1/worker/block_table.py ``ComputeSlotMappingKernel``. Context parallelism is refused at start.
    """
    query_start_loc = query_start_loc_ptr.to(torch.int64)
    total = int(query_start_loc[-1])
    requests = torch.repeat_interleave(
        torch.arange(query_start_loc.numel() - 1), query_start_loc.diff(), output_size=total
    )
    positions = positions_ptr[:total]
    blocks = block_table_ptr[requests, positions // KV_CACHE_BLOCK_SIZE].to(torch.int64)
    slot_mapping_ptr[:total] = blocks * KV_CACHE_BLOCK_SIZE + positions % KV_CACHE_BLOCK_SIZE
    slot_mapping_ptr[total:max_num_tokens].fill_(PAD_ID)
