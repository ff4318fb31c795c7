"""The norm after Gated DeltaNet layers, against vLLM's own form of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot

from fastattention_vllm.integration import compat

pytestmark = pytest.mark.skipif(not compat.has_cpu_linear_attention(), reason="nothing is replaced in this vLLM")


def norm(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """A norm as vLLM's layers create it."""
    from vllm.model_executor.layers.layernorm import RMSNormGated

    from fastattention_vllm.integration.cpu.stand_ins import gated_norm

    monkeypatch.delitem(op_registry_oot, gated_norm.NAME, raising=False)
    gated_norm.register()
    gated_norm.register()
    with set_current_vllm_config(VllmConfig()):
        created = RMSNormGated(32, eps=1e-5, **settings)
    assert isinstance(created, gated_norm.CpuGatedNorm)
    monkeypatch.delitem(op_registry_oot, gated_norm.NAME)
    torch.nn.init.normal_(created.weight)
    return created


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        {"norm_before_gate": True, "activation": "silu"},
        {"norm_before_gate": True, "activation": "sigmoid"},
        {"norm_before_gate": False},
        {"norm_before_gate": True, "group_size": 16},
    ],
    ids=["silu", "sigmoid", "the gate first", "groups"],
)
def test_it_equals_vllms_own(settings: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    created = norm(monkeypatch, **settings)
    x, gate = torch.randn(7, 4, 32).to(dtype), torch.randn(7, 4, 64).to(dtype)[..., :32]
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    with torch.no_grad():
        got = created.forward_cpu(x, gate)
        torch.testing.assert_close(got, created.forward_native(x, gate), rtol=rounding, atol=1e-6)
        assert got.dtype == dtype


def test_without_a_gate_it_is_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    created, x = norm(monkeypatch), torch.randn(3, 32)
    assert torch.equal(created.forward_cpu(x), created.forward_native(x))
