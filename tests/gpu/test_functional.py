"""``fast_attn_func`` and ``fast_attn_varlen_func`` on a GPU: FlashAttention, and the Volta kernels in its place."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from fastattention_vllm import fast_attn_func, fast_attn_varlen_func
from fastattention_vllm.attention import flash, functional
from fastattention_vllm.attention.kernels import kernels_for
from fastattention_vllm.attention.volta import kernels as volta
from tests.attention import oracle
from tests.attention.oracle import Case
from tests.attention.test_functional import batch, varlen

FP16 = torch.float16
TOLERANCE = 4e-3
"""Of fp16 outputs whose values are of the order of 1; the kernels round weights to fp16 as well."""


@pytest.fixture(autouse=True, params=[flash, volta], ids=["flash", "volta"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    assert kernels_for(torch.device("cuda", 0)) is flash, "of this GPU"
    monkeypatch.setattr(
        functional, "kernels_for", lambda device: request.param if device.type == "cuda" else kernels_for(device)
    )
    volta.choose("ptx-sm_75")
    yield request.param
    volta.choose("auto")


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window_size": (30, 0)}, {"softcap": 5.0}])
def test_fixed_length_equals_the_cpu_in_fp32(options: dict[str, Any]) -> None:
    q, k, v = (tensor.to(FP16) for tensor in batch(seqlen_q=100, seqlen_k=300))
    out, lse, nothing = fast_attn_func(q.cuda(), k.cuda(), v.cuda(), return_attn_probs=True, **options)
    assert nothing is None
    expected = fast_attn_func(q.float(), k.float(), v.float(), return_attn_probs=True, **options)
    assert out.is_cuda
    torch.testing.assert_close(out.cpu().float(), expected[0], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(lse.cpu(), expected[1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("page_size", [0, 16])
def test_varlen_equals_the_oracle(page_size: int) -> None:
    case = Case((5, 60, 1), (70, 60, 300), 8, 2, head_size=64, dtype=FP16, page_size=page_size)
    arguments = varlen(case)
    moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    out, lse, _ = fast_attn_varlen_func(**moved, return_attn_probs=True)
    expected, expected_lse = oracle.attention(case.build())
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(lse.cpu().double(), expected_lse.T, rtol=0, atol=TOLERANCE)


def test_it_compiles_as_one_graph() -> None:
    q, k, v = (tensor.to(FP16).cuda() for tensor in batch())
    compiled = torch.compile(fast_attn_func, fullgraph=True)
    assert torch.equal(compiled(q, k, v, causal=True), fast_attn_func(q, k, v, causal=True))


def test_what_the_kernels_do_not_take_is_refused(kernels: ModuleType) -> None:
    q, k, v = (tensor.cuda() for tensor in batch())
    with pytest.raises(ValueError, match="float32"):
        fast_attn_func(q, k, v)
