"""Who is measured by `fastattention bench volta`: our kernels, torch SDPA's, xformers, and Hugging Face's attention.

Everyone gets the same numbers in the layout that suits it best.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fastattention_vllm.attention import xformers
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.attention.volta import kernels as volta

OURS = "ours"
PAGE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """``tokens`` new ones of as many (prefill), or one new one of ``context`` (decode)."""

    kind: str
    batch: int
    heads: int
    kv_heads: int
    head_size: int
    context: int
    causal: bool = True

    @property
    def queries(self) -> int:
        return self.context if self.kind == "prefill" else 1

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def flops(self) -> float:
        """Two products, of the pairs of query and key that are visible."""
        pairs = self.queries * self.context
        if self.causal and self.kind == "prefill":
            pairs = self.context * (self.context + 1) // 2
        return 4.0 * self.head_size * pairs * self.heads * self.batch

    @property
    def kv_bytes(self) -> int:
        """fp16 keys and values of all sequences, each read once."""
        return 4 * self.head_size * self.context * self.kv_heads * self.batch

    def __str__(self) -> str:
        shape = f"({self.heads},{self.kv_heads},{self.head_size}) {self.context} b{self.batch}"
        return f"{self.kind} {shape}" + ("" if self.causal else " not causal")


@dataclass(frozen=True, slots=True)
class Layer:
    """fp16 ``[batch, tokens, heads, head_size]`` each."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


Call = Callable[[], torch.Tensor]
"""Computes a case over one layer."""


class Contender(Protocol):
    name: str

    def why_not(self, case: Case) -> str | None:
        """Why it cannot run ``case``, in one sentence."""

    def bind(self, case: Case, layer: Layer) -> Call:
        """Ready to run."""

    def shaped(self, case: Case, out: torch.Tensor) -> torch.Tensor:
        """What the call returned as ``[batch, queries, heads, head_size]``."""


class Ours:
    """Keys and values side by side, without pages: what the others get, too."""

    name = OURS

    def why_not(self, case: Case) -> str | None:
        return None

    def bind(self, case: Case, layer: Layer) -> Call:
        device = layer.query.device
        key, value = layer.key.flatten(0, 1), layer.value.flatten(0, 1)
        starts = torch.arange(case.batch, dtype=torch.int32, device=device) * case.context
        return _ours(case, layer.query, key, value, kv_start_loc=starts)

    def shaped(self, case: Case, out: torch.Tensor) -> torch.Tensor:
        return out.view(case.batch, case.queries, case.heads, case.head_size)


class OursPaged(Ours):
    """As vLLM keeps them: ``[blocks, KV heads, 16, K | V]``, blocks in no order."""

    name = f"ours, pages of {PAGE}"

    def why_not(self, case: Case) -> str | None:
        return f"{case.context} tokens do not fill pages of {PAGE}." if case.context % PAGE else None

    def bind(self, case: Case, layer: Layer) -> Call:
        device, size = layer.query.device, case.head_size
        pages = case.batch * case.context // PAGE
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).to(device)
        cache = torch.empty(pages, case.kv_heads, PAGE, 2 * size, dtype=layer.key.dtype, device=device)
        by_token = cache.transpose(1, 2)
        by_token[order, ..., :size] = layer.key.reshape(pages, PAGE, case.kv_heads, size)
        by_token[order, ..., size:] = layer.value.reshape(pages, PAGE, case.kv_heads, size)
        table = order.to(torch.int32).view(case.batch, -1)
        return _ours(case, layer.query, by_token[..., :size], by_token[..., size:], block_table=table)


def _ours(case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **where: Any) -> Call:
    device = query.device
    problem = AttentionProblem(
        query=query.flatten(0, 1),
        key=key,
        value=value,
        query_start_loc=torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.queries,
        seq_lens=torch.full((case.batch,), case.context, dtype=torch.int32, device=device),
        scale=case.head_size**-0.5,
        causal=case.causal,
        **where,
    )
    out = torch.empty_like(problem.query)
    extent = volta.Extent(case.queries, case.context)

    def run() -> torch.Tensor:
        volta.attend(problem, extent, out)
        return out

    return run


class Sdpa:
    """One of the kernels that torch's scaled_dot_product_attention chooses among."""

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name, self.backend = f"torch SDPA, {name}", backend

    def why_not(self, case: Case) -> str | None:
        return None

    def bind(self, case: Case, layer: Layer) -> Call:
        # One new token: the query heads of a KV head become rows, so that keys and values are read once.
        query = layer.query
        if case.queries == 1:
            query = query.view(case.batch, case.kv_heads, case.group, case.head_size).transpose(1, 2)
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, layer.key, layer.value))
        causal = case.causal and case.queries > 1
        grouped = case.group > 1 and case.queries > 1

        def run() -> torch.Tensor:
            with sdpa_kernel(self.backend):
                return scaled_dot_product_attention(
                    q, k, v, is_causal=causal, scale=case.head_size**-0.5, enable_gqa=grouped
                )

        return run

    def shaped(self, case: Case, out: torch.Tensor) -> torch.Tensor:
        """``[batch, heads, queries, head_size]``; of one token ``[batch, KV heads, group, head_size]``."""
        if case.queries == 1:
            return out.reshape(case.batch, 1, case.heads, case.head_size)
        return out.transpose(1, 2)


class Xformers:
    """memory_efficient_attention, with the operator that xformers itself takes on this GPU."""

    name = "xformers"

    def why_not(self, case: Case) -> str | None:
        if xformers.version() is None:
            return "xformers is not installed: pip install xformers in the release that belongs to this torch."
        if case.group > 1 and case.queries > 1:
            return "prefill with several query heads per KV head is not measured with xformers."
        return None

    def bind(self, case: Case, layer: Layer) -> Call:
        ops: Any = importlib.import_module("xformers.ops")
        query = layer.query
        if case.queries == 1:
            query = query.view(case.batch, case.kv_heads, case.group, case.head_size).transpose(1, 2).contiguous()
        bias = ops.LowerTriangularMask() if case.causal and case.queries > 1 else None

        def run() -> torch.Tensor:
            out: torch.Tensor = ops.memory_efficient_attention(
                query, layer.key, layer.value, attn_bias=bias, scale=case.head_size**-0.5
            )
            return out

        return run

    def shaped(self, case: Case, out: torch.Tensor) -> torch.Tensor:
        """``[batch, queries, heads, head_size]``; of one token ``[batch, group, KV heads, head_size]``."""
        return out.transpose(1, 2).reshape(case.batch, 1, case.heads, case.head_size) if case.queries == 1 else out


class Eager:
    """As transformers' eager_attention_forward: all scores in memory, the softmax in fp32."""

    name = "eager (Hugging Face)"

    def why_not(self, case: Case) -> str | None:
        return None

    def bind(self, case: Case, layer: Layer) -> Call:
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (layer.query, layer.key, layer.value))
        mask = None
        if case.causal and case.queries > 1:
            minimum = torch.finfo(q.dtype).min
            mask = torch.full((case.queries, case.context), minimum, dtype=q.dtype, device=q.device).triu(1)[None, None]

        def per_query_head(tensor: torch.Tensor) -> torch.Tensor:
            if case.group == 1:
                return tensor
            wide = (case.batch, case.kv_heads, case.group, case.context, case.head_size)
            return tensor[:, :, None].expand(wide).reshape(case.batch, case.heads, case.context, case.head_size)

        def run() -> torch.Tensor:
            scores = torch.matmul(q, per_query_head(k).transpose(2, 3)) * case.head_size**-0.5
            if mask is not None:
                scores = scores + mask
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
            return torch.matmul(weights, per_query_head(v))

        return run

    def shaped(self, case: Case, out: torch.Tensor) -> torch.Tensor:
        return out.transpose(1, 2)


def contenders(names: list[str] | None = None) -> list[Contender]:
    """All, or those whose name begins with one of ``names``; ours always. ``ValueError`` for a name of nobody."""
    everyone: list[Contender] = [
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
