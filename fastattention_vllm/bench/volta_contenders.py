"""Who is measured by `fastattention bench volta`: our kernels, torch SDPA's, xformers, and Hugging Face's attention.

Used by: volta.py.

Everyone gets the same numbers in the layout that suits it best.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fastattention_vllm.attention import xformers
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.attention.volta import kernels as volta
from fastattention_vllm.bench.cases import Case
from fastattention_vllm.bench.contender import Bound, Call, Contender

OURS = "ours"
PAGE = 16


@dataclass(frozen=True, slots=True)
class Layer:
    """fp16 ``[batch, tokens, KV heads, head_size]`` each."""

    key: torch.Tensor
    value: torch.Tensor


VoltaContender = Contender[Layer]


class Ours:
    """Keys and values side by side, without pages: what the others get, too."""

    name = peer = OURS

    def why_not(self, case: Case) -> str | None:
        return None

    def bind(self, case: Case, query: torch.Tensor, layers: Sequence[Layer]) -> Bound:
        starts = torch.arange(case.batch, dtype=torch.int32, device=query.device) * case.kv_len
        return Bound(
            [_ours(case, query, one.key.flatten(0, 1), one.value.flatten(0, 1), kv_start_loc=starts) for one in layers]
        )


class OursPaged:
    """As vLLM keeps them: ``[blocks, KV heads, 16, K | V]``, blocks in no order."""

    name = peer = f"ours, pages of {PAGE}"

    def why_not(self, case: Case) -> str | None:
        return f"{case.kv_len} tokens do not fill pages of {PAGE}." if case.kv_len % PAGE else None

    def bind(self, case: Case, query: torch.Tensor, layers: Sequence[Layer]) -> Bound:
        pages = case.batch * case.kv_len // PAGE
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).to(query.device)
        table = order.to(torch.int32).view(case.batch, -1)
        return Bound([_ours(case, query, *self._cache(case, one, order), block_table=table) for one in layers])

    def _cache(self, case: Case, layer: Layer, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size, pages = case.head_size, len(order)
        shape = (pages, case.num_kv_heads, PAGE, 2 * size)
        by_token = torch.empty(shape, dtype=layer.key.dtype, device=layer.key.device).transpose(1, 2)
        by_token[order, ..., :size] = layer.key.reshape(pages, PAGE, case.num_kv_heads, size)
        by_token[order, ..., size:] = layer.value.reshape(pages, PAGE, case.num_kv_heads, size)
        return by_token[..., :size], by_token[..., size:]


def _ours(case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **where: Any) -> Call:
    device = query.device
    problem = AttentionProblem(
        query=query,
        key=key,
        value=value,
        query_start_loc=torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.q_len,
        seq_lens=torch.full((case.batch,), case.kv_len, dtype=torch.int32, device=device),
        scale=case.head_size**-0.5,
        causal=case.causal,
        **where,
    )
    out = torch.empty_like(query)
    extent = volta.Extent(case.q_len, case.kv_len)

    def run() -> torch.Tensor:
        volta.attend(problem, extent, out)
        return out

    return run


def _folded(case: Case, query: torch.Tensor) -> torch.Tensor:
    """``[batch, rows, heads, head_size]``. One new token: the query heads of a KV head become rows, so that keys and
    values are read once."""
    if case.q_len > 1:
        return query.view(case.batch, case.q_len, case.num_heads, case.head_size)
    return query.view(case.batch, case.num_kv_heads, case.group, case.head_size).transpose(1, 2)


def _unfolded(case: Case, out: torch.Tensor) -> torch.Tensor:
    """``[batch * q_len, heads, head_size]`` of the answer to :func:`_folded`'s queries, in the same form."""
    out = out if case.q_len > 1 else out.transpose(1, 2)
    return out.reshape(case.batch * case.q_len, case.num_heads, case.head_size)


class Sdpa:
    """One of the kernels that torch's scaled_dot_product_attention chooses among."""

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name = self.peer = f"torch SDPA, {name}"
        self.backend = backend

    def why_not(self, case: Case) -> str | None:
        return None

    def bind(self, case: Case, query: torch.Tensor, layers: Sequence[Layer]) -> Bound:
        by_head = _folded(case, query).transpose(1, 2)
        causal = case.causal and case.q_len > 1
        grouped = case.group > 1 and case.q_len > 1

        def call(key: torch.Tensor, value: torch.Tensor) -> Call:
            def run() -> torch.Tensor:
                with sdpa_kernel(self.backend):
                    return scaled_dot_product_attention(
                        by_head, key, value, is_causal=causal, scale=case.head_size**-0.5, enable_gqa=grouped
                    )

            return run

        calls = [call(one.key.transpose(1, 2), one.value.transpose(1, 2)) for one in layers]
        return Bound(calls, shaped=lambda out: _unfolded(case, out.transpose(1, 2)))


class Xformers:
    """memory_efficient_attention, with the operator that xformers itself takes on this GPU."""

    name = peer = "xformers"

    def why_not(self, case: Case) -> str | None:
        if xformers.version() is None:
            return "xformers is not installed: pip install xformers in the release that belongs to this torch."
        if case.group > 1 and case.q_len > 1:
            return "prefill with several query heads per KV head is not measured with xformers."
        return None

    def bind(self, case: Case, query: torch.Tensor, layers: Sequence[Layer]) -> Bound:
        ops: Any = importlib.import_module("xformers.ops")
        folded = _folded(case, query).contiguous()
        bias = ops.LowerTriangularMask() if case.causal and case.q_len > 1 else None

        def call(layer: Layer) -> Call:
            def run() -> torch.Tensor:
                out: torch.Tensor = ops.memory_efficient_attention(
                    folded, layer.key, layer.value, attn_bias=bias, scale=case.head_size**-0.5
                )
                return out

            return run

        return Bound([call(one) for one in layers], shaped=lambda out: _unfolded(case, out))


class Eager:
    """As transformers' eager_attention_forward: all scores in memory, the softmax in fp32."""

    name = peer = "eager (Hugging Face)"

    def why_not(self, case: Case) -> str | None:
        return None

    def bind(self, case: Case, query: torch.Tensor, layers: Sequence[Layer]) -> Bound:
        by_head = query.view(case.batch, case.q_len, case.num_heads, case.head_size).transpose(1, 2).contiguous()
        mask = None
        if case.causal and case.q_len > 1:
            lowest = torch.finfo(query.dtype).min
            mask = torch.full((case.q_len, case.kv_len), lowest, dtype=query.dtype, device=query.device)
            mask = mask.triu(1)[None, None]

        def per_query_head(tensor: torch.Tensor) -> torch.Tensor:
            if case.group == 1:
                return tensor
            wide = (case.batch, case.num_kv_heads, case.group, case.kv_len, case.head_size)
            return tensor[:, :, None].expand(wide).reshape(case.batch, case.num_heads, case.kv_len, case.head_size)

        def call(key: torch.Tensor, value: torch.Tensor) -> Call:
            def run() -> torch.Tensor:
                scores = torch.matmul(by_head, per_query_head(key).transpose(2, 3)) * case.head_size**-0.5
                if mask is not None:
                    scores = scores + mask
                weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
                return torch.matmul(weights, per_query_head(value))

            return run

        calls = [call(one.key.transpose(1, 2).contiguous(), one.value.transpose(1, 2).contiguous()) for one in layers]
        return Bound(calls, shaped=lambda out: out.transpose(1, 2).flatten(0, 1))


def contenders(names: list[str] | None = None) -> list[VoltaContender]:
    """All, or those whose name begins with one of ``names``; ours always. ``ValueError`` for a name of nobody."""
    everyone: list[VoltaContender] = [
        Ours(),
        OursPaged(),
        Sdpa("mem-efficient", SDPBackend.EFFICIENT_ATTENTION),
        Sdpa("flash", SDPBackend.FLASH_ATTENTION),
        Sdpa("math", SDPBackend.MATH),
        Xformers(),
        Eager(),
    ]
    if names is None:
        return everyone
    for name in names:
        if not any(one.name.startswith(name) for one in everyone):
            known = ", ".join(repr(one.name) for one in everyone)
            raise ValueError(f"there is no contender {name!r}; there are {known}.")
    return [one for one in everyone if one.name == OURS or one.name.startswith(tuple(names))]
