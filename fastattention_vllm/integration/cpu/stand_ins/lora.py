"""LoRA on CPUs: requests without an adapter get none.

Why: vLLM marks such tokens with adapter index -1, and its torch implementation (``vllm/lora/ops/torch_ops``) indexes
the stacked adapters with it, which selects the last one. As soon as ``--max-loras`` adapters are loaded, requests for
the base model use the last adapter. Seen in 0.32.0.
Remove when: vLLM's ``bgmv_*`` torch ops handle -1.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class CpuPunicaWrapper(PunicaWrapperCPU):
    """Sets the input of an adapter's second half to zero for tokens without an adapter, so that it adds zero."""

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
