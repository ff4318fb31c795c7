"""Who is measured on CPUs. All read the same raw memory, each in its own layout.

Used by: command.py and runner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.cpu.layer import Batch, LayerAttention
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.bench import sdpa, vllm_native
from fastattention_vllm.bench.cases import DTYPES, Case
from fastattention_vllm.bench.contender import Bound, Contender, block_table, sequence_tensors

OURS = "ours"
CpuContender = Contender[torch.Tensor]
"""Its layers: uint8 of ``case.layer_bytes`` each."""


class Ours:
    name = OURS
    peer = OURS

    def why_not(self, case: Case) -> str | None:
        dtype, kv_dtype = DTYPES[case.dtype], DTYPES[case.kv_dtype]
        cache = torch.empty(1, 1, case.num_kv_heads, case.head_size, dtype=kv_dtype)
        starts, seq_lens = sequence_tensors(case)
        query = torch.empty(0, case.num_heads, case.head_size, dtype=dtype)
        return cpu.can_run(AttentionProblem(query, cache, cache, starts, seq_lens, 1.0, True, block_table(case)))

    def bind(self, case: Case, query: torch.Tensor, layers: Sequence[torch.Tensor]) -> Bound:
        """As the backend keeps them: ``[blocks, KV heads, K and V, page, head_size]``."""
        table = block_table(case)
        starts, seq_lens = sequence_tensors(case)
        shape = (table.numel(), case.num_kv_heads, 2, case.page, case.head_size)
        caches = [layer.view(DTYPES[case.kv_dtype]).view(shape) for layer in layers]
        out = torch.empty_like(query)
        batch = Batch(starts, seq_lens, table, causal=True)

        def call(cache: torch.Tensor) -> Callable[[], torch.Tensor]:
            key, value = cache.permute(2, 0, 3, 1, 4)
            problem = AttentionProblem(
                query, key, value, starts, seq_lens, case.head_size**-0.5, causal=True, block_table=table
            )

            attention = LayerAttention(problem, out)

            def run() -> torch.Tensor:
                attention.run(query, batch, out)
                return out

            return run

        def load(sequence: int, first_token: int, key: torch.Tensor, value: torch.Tensor) -> None:
            for start in range(0, key.shape[0], case.page):
                page = caches[0][int(table[sequence, (first_token + start) // case.page])]
                rows = key[start : start + case.page].shape[0]
                page[:, 0, :rows] = key[start : start + rows].transpose(0, 1)
                page[:, 1, :rows] = value[start : start + rows].transpose(0, 1)

        return Bound([call(cache) for cache in caches], load)


def contenders(names: list[str] | None = None) -> list[CpuContender]:
    """All that are known, ours first, or those of ``names``; ``ValueError`` naming them if one is not known."""
    known: dict[str, list[CpuContender]] = {
        OURS: [Ours()],
        "sdpa": [sdpa.Sdpa(), sdpa.SdpaFolded()],
        "vllm": [vllm_native.CpuAttn()],
    }
    for name in names or ():
        if name not in known:
            raise ValueError(f"there is no contender {name!r}; choose from {', '.join(known)}.")
    return [contender for name, group in known.items() if names is None or name in names for contender in group]
