"""The stand-in kernel for experts, against float64 with one token and one expert at a time."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fastattention_vllm.integration.cpu.stand_ins.moe import ACTIVATIONS, cpu_fused_moe

TOKENS, HIDDEN, INTER, EXPERTS, TOP_K = 7, 16, 24, 5, 2


def activate(name: str, gate_up: torch.Tensor) -> torch.Tensor:
    if name == "swigluoai":  # the formula of transformers' GptOssExperts
        gate, up = gate_up[::2].clamp(max=7.0), gate_up[1::2].clamp(-7.0, 7.0)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    gate, up = gate_up[:INTER], gate_up[INTER:]
    return {
        "silu": functional.silu(gate),
        "gelu": functional.gelu(gate),
        "gelu_tanh": functional.gelu(gate, approximate="tanh"),
    }[name] * up


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("skip_weighted", [True, False])
def test_experts_equal_float64(name: str, bias: bool, skip_weighted: bool) -> None:
    torch.manual_seed(0)
    hidden, w13, w2 = (
        torch.randn(TOKENS, HIDDEN),
        torch.randn(EXPERTS, 2 * INTER, HIDDEN),
        torch.randn(EXPERTS, HIDDEN, INTER),
    )
    b13, b2 = (torch.randn(EXPERTS, 2 * INTER), torch.randn(EXPERTS, HIDDEN)) if bias else (None, None)
    ids = torch.stack([torch.randperm(EXPERTS - 1)[:TOP_K] for _ in range(TOKENS)]).int()  # one expert stays idle
    weights = torch.rand(TOKENS, TOP_K)
    out = torch.full((TOKENS, HIDDEN), float("nan"))
    cpu_fused_moe(out, hidden, w13, w2, b13, b2, weights, ids, skip_weighted, name, "vec")
    for token in range(TOKENS):
        wanted = torch.zeros(HIDDEN, dtype=torch.float64)
        for weight, expert in zip(weights[token].double(), ids[token].long(), strict=True):
            gate_up = w13[expert].double() @ hidden[token].double() + (0 if b13 is None else b13[expert].double())
            result = w2[expert].double() @ activate(name, gate_up) + (0 if b2 is None else b2[expert].double())
            wanted += result if skip_weighted else weight * result
        torch.testing.assert_close(out[token].double(), wanted, atol=2e-4, rtol=1e-5)
