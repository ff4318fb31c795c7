"""``fast_attn_func`` and ``fast_attn_varlen_func`` on a GPU: vLLM's FlashAttention, PyTorch's, and the Volta kernels.

The problems are those of tests/attention/test_families.py. Families that this machine lacks are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from fastattention_vllm import fast_attn_func, fast_attn_varlen_func
from fastattention_vllm.attention import flash, functional, torch_flash
from fastattention_vllm.attention.kernels import kernels_for, vllm_has_flash
from fastattention_vllm.attention.volta import kernels as volta
from tests.attention import oracle
from tests.attention.families import FEATURES, UNDER_TEST
from tests.attention.oracle import Case
from tests.attention.test_functional import batch, varlen

FP16 = torch.float16
TOLERANCE = 4e-3
"""Tolerance for fp16 outputs of values of about 1. The kernels also round weights to fp16."""
MODULES = {"flash": flash, "torch_flash": torch_flash, "volta": volta}


@dataclass(frozen=True)
class OnGpu:
    module: ModuleType
    refuses: dict[str, str]


@pytest.fixture(autouse=True, params=MODULES)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnGpu]:
    expected = flash if vllm_has_flash() else torch_flash
    assert kernels_for(torch.device("cuda", 0)) is expected, "must be the kernels of this GPU"
    if request.param == "flash" and not vllm_has_flash():
        pytest.skip("needs vLLM's CUDA build")
    module = MODULES[request.param]
    monkeypatch.setattr(
        functional, "kernels_for", lambda device: module if device.type == "cuda" else kernels_for(device)
    )
    volta.choose("ptx-sm_75")
    alibi = "does not support alibi_slopes"
    refused_by_flash = {"sinks": "sinks", "alibi": alibi, "alibi per sequence": alibi}
    yield OnGpu(module, dict(UNDER_TEST[request.param].refuses) if request.param in UNDER_TEST else refused_by_flash)
    volta.choose("auto")


def on_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: given.cuda() if isinstance(given, torch.Tensor) else given for name, given in arguments.items()}


def half(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(FP16) for tensor in tensors]


@pytest.mark.parametrize("feature", FEATURES)
def test_fixed_length_equals_the_cpu_in_fp32(family: OnGpu, feature: str) -> None:
    q, k, v = half(*batch(seqlen_q=100, seqlen_k=300))
    given = on_gpu({"q": q, "k": k, "v": v} | FEATURES[feature])
    if feature in family.refuses:
        with pytest.raises(ValueError, match=family.refuses[feature]):
            fast_attn_func(**given)
        return
    out, lse, nothing = fast_attn_func(**given, return_attn_probs=True)
    assert nothing is None
    expected = fast_attn_func(q.float(), k.float(), v.float(), return_attn_probs=True, **FEATURES[feature])
    assert out.is_cuda
    torch.testing.assert_close(out.cpu().float(), expected[0], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(lse.cpu(), expected[1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (8, 1)], ids=str)
def test_varlen_equals_the_oracle(page_size: int, heads: tuple[int, int]) -> None:
    case = Case((5, 60, 1), (70, 60, 300), *heads, head_size=64, dtype=FP16, page_size=page_size)
    out, lse, _ = fast_attn_varlen_func(**on_gpu(varlen(case)), return_attn_probs=True)
    expected, expected_lse = oracle.attention(case.build())
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(lse.cpu().double(), expected_lse.T, rtol=0, atol=TOLERANCE)


def test_queries_before_the_first_key_see_nothing() -> None:
    q, k, v = (tensor.cuda() for tensor in half(*batch(seqlen_q=50, seqlen_k=20)))
    out, lse, _ = fast_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out[:, :30] == 0).all()
    assert (lse[..., :30] == -torch.inf).all()
    assert lse[..., 30:].isfinite().all()


def test_empty_queries_and_keys() -> None:
    q, k, v = (tensor.cuda() for tensor in half(*batch(seqlen_k=0)))
    out, lse, _ = fast_attn_func(q, k, v, return_attn_probs=True)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert fast_attn_func(q[:, :0], q[:, :, :2], q[:, :, :2]).shape == (3, 0, 4, 64)


def test_the_functions_compile_as_one_graph() -> None:
    q, k, v = (tensor.cuda() for tensor in half(*batch()))
    compiled = torch.compile(fast_attn_func, fullgraph=True)
    assert torch.equal(compiled(q, k, v, causal=True), fast_attn_func(q, k, v, causal=True))


def test_inputs_that_the_kernels_do_not_support_are_refused() -> None:
    q, k, v = (tensor.cuda() for tensor in batch())
    with pytest.raises(ValueError, match="float32"):
        fast_attn_func(q, k, v)
