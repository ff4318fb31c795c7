"""LoRA on CPUs: requests without an adapter get none.

Why: vLLM marks such tokens with adapter index -1, and its torch implementation (``vllm/lora/ops/torch_ops``) indexes
the stacked adapters with it, which in torch means the last one. Once ``--max-loras`` adapters are loaded, the base
model's requests are answered with the last adapter. Seen in 0.32.0.
Remove when: vLLM's ``bgmv_*`` torch ops heed -1.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class CpuPunicaWrapper(PunicaWrapperCPU):
    """Gives zeros to the second half of every adapter whose token has none: whatever it adds is then zero."""

    def add_shrink(
        self, y: Any, x: torch.Tensor, lora_a_stacked: tuple[torch.Tensor, ...], scale: float, **kwargs: Any
    ) -> None:
        super().add_shrink(y, x, lora_a_stacked, scale, **kwargs)
        for rank_wide in y:
            rank_wide.view(-1, rank_wide.shape[-1])[self.token_lora_indices < 0] = 0

    def add_lora_embedding(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().add_lora_embedding(y, _zero_without_adapter(x, self.token_lora_indices), *args, **kwargs)

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        x = _zero_without_adapter(x.view(-1, x.shape[-1]), self.sampler_indices)
        return super().add_lora_logits(y, x, *args, **kwargs)


def _zero_without_adapter(x: torch.Tensor, adapter: torch.Tensor) -> torch.Tensor:
    return torch.where(adapter[:, None] < 0, 0, x)
