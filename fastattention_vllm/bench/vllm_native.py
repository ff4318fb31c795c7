"""vLLM's own CPU attention, CPU_ATTN: the compiled operators of a vLLM built for CPUs, called as its backend does.

Used by: contenders.py.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fastattention_vllm.bench.cases import DTYPES, Case
from fastattention_vllm.bench.contender import Bound, block_table, sequence_tensors


@functools.cache
def _operators() -> tuple[Any, Any] | str:
    """``vllm._custom_ops`` and the function that chooses the instruction set, or why they cannot be had."""
    found = importlib.util.find_spec("vllm")
    if found is None:
        return "vLLM is not installed here."
    # Looked for first: to import what is missing makes vLLM print a warning of its own.
    if not any(library for folder in found.submodule_search_locations or [] for library in Path(folder).glob("_C*.so")):
        return "This vLLM has no compiled CPU kernels; a CPU build of it, in an environment of its own, has CPU_ATTN."
    try:
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        from vllm import _custom_ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        _ = torch.ops._C.cpu_attention_with_kv_cache
    except Exception as error:  # whatever a vLLM without these kernels raises: the peer is then left out by name
        return f"vLLM's CPU kernels are not importable here ({type(error).__name__}: {error})."
    return _custom_ops, _get_attn_isa


class CpuAttn:
    name = "vllm"
    peer = "vLLM CPU_ATTN"

    def why_not(self, case: Case) -> str | None:
        operators = _operators()
        if isinstance(operators, str):
            return operators
        if case.kv_dtype not in (case.dtype, "fp8"):
            return f"CPU_ATTN has no {case.kv_dtype} cache for {case.dtype} models."
        return None

    def bind(self, case: Case, query: torch.Tensor, layers: Sequence[torch.Tensor]) -> Bound:
        operators = _operators()
        assert not isinstance(operators, str)
        ops, choose_isa = operators
        dtype = DTYPES[case.dtype]
        # Only where it is needed: older versions know neither fp8 nor the argument.
        cache_dtype = {"kv_cache_dtype": "fp8_e4m3"} if case.kv_dtype == "fp8" else {}
        isa = choose_isa(dtype, case.page, case.head_size, *cache_dtype.values())
        table = block_table(case)
        starts, seq_lens = sequence_tensors(case)
        shape = (table.numel(), case.num_kv_heads, 2 * case.page, case.head_size)
        caches = [layer.view(torch.uint8 if cache_dtype else dtype).view(shape).chunk(2, dim=2) for layer in layers]
        out = torch.empty_like(query)
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=case.batch,
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_size,
            seq_lens=seq_lens,
            dtype=dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=True,
            **cache_dtype,
        )

        def call(key: torch.Tensor, value: torch.Tensor) -> Callable[[], torch.Tensor]:
            def run() -> torch.Tensor:
                ops.cpu_attention_with_kv_cache(
                    query=query,
                    key_cache=key,
                    value_cache=value,
                    output=out,
                    query_start_loc=starts,
                    seq_lens=seq_lens,
                    scale=case.head_size**-0.5,
                    causal=True,
                    alibi_slopes=None,
                    sliding_window=-1,
                    block_table=table,
                    softcap=0.0,
                    scheduler_metadata=metadata,
                    s_aux=None,
                    **cache_dtype,
                )
                return out

            return run

        def load(sequence: int, first_token: int, key: torch.Tensor, value: torch.Tensor) -> None:
            tokens = torch.arange(first_token, first_token + key.shape[0])
            slots = table[sequence].long()[tokens // case.page] * case.page + tokens % case.page
            ops.cpu_attn_reshape_and_cache(key.to(dtype), value.to(dtype), *caches[0], slots, isa, **cache_dtype)

        return Bound([call(*cache) for cache in caches], load)
