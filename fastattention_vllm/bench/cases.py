"""What is measured, on every device: one attention problem each, written as people say it.

Used by: command.py, runner.py, volta.py and every contender.

    decode bf16 (32,8,128) 32K b16              16 sequences of 32768 tokens, one new token each
    decode bf16/fp8 (32,8,128) 32K b1 page16    an fp8 cache, 16 tokens a page
    prefill fp16 (8,1,64) 4K                    4096 tokens, causal
    prefill bf16 (32,8,128) 512 on 8K           512 new tokens after 8192 that lie in the cache

Heads are (query heads, KV heads, head size).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

DEFAULT_PAGE = 128
"""Tokens per page: vLLM's own default on CPUs."""

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}

_SPELLING = re.compile(
    r"(?P<kind>decode|prefill) (?P<dtype>fp32|fp16|bf16)(/(?P<kv_dtype>fp32|fp16|bf16|fp8))? "
    r"\((?P<heads>\d+), ?(?P<kv_heads>\d+), ?(?P<head_size>\d+)\) "
    r"((?P<new>\d+K?) on )?(?P<tokens>\d+K?)( b(?P<batch>\d+))?( page(?P<page>\d+))?"
)


@dataclass(frozen=True, slots=True)
class Case:
    """One problem: ``batch`` sequences of ``kv_len`` tokens in the cache, the last ``q_len`` of which are queries."""

    kind: str
    """``decode`` (cold cache, rotating over memory) or ``prefill`` (causal)."""
    dtype: str
    kv_dtype: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    kv_len: int
    q_len: int = 1
    batch: int = 1
    page: int = DEFAULT_PAGE
    causal: bool = True
    """False only for prefill on GPUs; no spelling asks for it."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def pages_per_seq(self) -> int:
        return -(-self.kv_len // self.page)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that have to be read, without the unused rest of last pages."""
        return self.batch * self.kv_len * self.bytes_per_token

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's cache, in whole pages."""
        return self.batch * self.pages_per_seq * self.page * self.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_size * DTYPES[self.kv_dtype].itemsize

    @property
    def flops(self) -> int:
        """Of the two matrix products, over the pairs of query and key that are visible."""
        own = self.q_len * (self.q_len + 1) // 2 if self.causal else self.q_len**2
        seen = self.q_len * (self.kv_len - self.q_len) + own
        return 4 * self.head_size * self.num_heads * self.batch * seen

    def __str__(self) -> str:
        dtype = self.dtype if self.dtype == self.kv_dtype else f"{self.dtype}/{self.kv_dtype}"
        heads = f"({self.num_heads},{self.num_kv_heads},{self.head_size})"
        if self.kind == "decode":
            size = f"{_thousands(self.kv_len)} b{self.batch}"
        else:
            before = self.kv_len - self.q_len
            size = f"{_thousands(self.q_len)} on {_thousands(before)}" if before else _thousands(self.kv_len)
            size += f" b{self.batch}" if self.batch > 1 else ""
        page = "" if self.page == DEFAULT_PAGE else f" page{self.page}"
        return f"{self.kind} {dtype} {heads} {size}{page}" + ("" if self.causal else " not causal")


def parse_case(text: str, page: int = DEFAULT_PAGE) -> Case:
    """The case that ``text`` spells, see the top of this file; ``ValueError`` with one sentence if it spells none."""
    match = _SPELLING.fullmatch(" ".join(text.split()))
    if match is None:
        raise ValueError(
            f"case {text!r} is not understood; write it like 'decode bf16 (32,8,128) 32K b1', "
            "'prefill fp16 (8,1,64) 4K' or 'prefill bf16 (32,8,128) 512 on 8K'."
        )
    heads, kv_heads, head_size = (int(match[name]) for name in ("heads", "kv_heads", "head_size"))
    tokens, new = _number(match["tokens"]), match["new"]
    if match["kind"] == "decode" and new is not None:
        raise ValueError(f"case {text!r}: decode has one new token per sequence, so leave out '{new} on'.")
    case = Case(
        kind=match["kind"],
        dtype=match["dtype"],
        kv_dtype=match["kv_dtype"] or match["dtype"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        kv_len=tokens + (_number(new) if new else 0),
        q_len=1 if match["kind"] == "decode" else _number(new or match["tokens"]),
        batch=int(match["batch"] or 1),
        page=int(match["page"] or page),
    )
    if 0 in (heads, kv_heads, head_size, tokens, case.q_len, case.batch, case.page):
        raise ValueError(f"case {text!r}: every number must be at least 1.")
    if heads % kv_heads:
        raise ValueError(f"case {text!r}: {heads} query heads are not a multiple of {kv_heads} KV heads.")
    return case


def _number(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("K") else int(text)


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
