"""The norm after Gated DeltaNet layers on CPUs, by one kernel instead of ten torch calls.

Why: vLLM has no CPU kernel for it. With torch.compile nothing is replaced, because vLLM's own form is fused there.
Remove when: vLLM's ``RMSNormGated`` has a CPU kernel.
"""

from __future__ import annotations

import torch
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.layernorm import RMSNormGated

from fastattention_vllm.attention.cpu.gated_delta import gated_norm

NAME = RMSNormGated.__name__


class CpuGatedNorm(RMSNormGated):
    def forward_cpu(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        if z is None or self.group_size is not None or not self.norm_before_gate or torch.compiler.is_compiling():
            native: torch.Tensor = self.forward_native(x, z)
            return native
        return gated_norm(x, z, self.weight, self.eps, self.activation)


def register() -> None:
    """Must be called before the first layer is created. Idempotent."""
    if NAME not in op_registry_oot:
        CustomOp.register_oot(CpuGatedNorm, name=NAME)
