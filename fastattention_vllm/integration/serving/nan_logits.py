"""Counts the tokens whose logits contain NaN, and says once what that usually is.

vLLM samples from such logits without a word, mostly token 0. Its own count waits for the device in every step.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.logger import init_logger

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.serving.once_imported import once_imported

logger = init_logger("vllm.fastattention")

CAUSES = {
    torch.float16: "The probable cause is an activation above 65504, the largest float16 number. Serve the model with "
    "--dtype bfloat16 or float32 if the device has it, or serve another model",
}
OTHER_CAUSE = "A file of the model may be damaged. Download or copy the model again"


class NanCount:
    """The number of rows of logits with NaN since the start of this process."""

    def __init__(self) -> None:
        self._on_device: torch.Tensor | None = None
        self._on_host = torch.zeros((), dtype=torch.int64)
        self._said = False

    @property
    def total(self) -> int:
        """As of a recent step: a device may not have reached the last one."""
        return int(self._on_host)

    def add(self, logits: torch.Tensor) -> None:
        """Count the rows of ``logits [tokens, vocab]`` with NaN. This does not wait for the device.

        The number arrives in host memory when the device has computed it, so the log has it some steps later. Inside a
        CUDA graph, the graph counts.
        """
        found = logits.amax(dim=-1).isnan().sum()
        if logits.device.type == "cpu":
            self._on_host += found
        else:
            if self._on_device is None:
                self._on_device = torch.zeros_like(found)
                self._on_host = torch.zeros((), dtype=torch.int64, pin_memory=True)
            self._on_device += found
            self._on_host.copy_(self._on_device, non_blocking=True)
        if not self._said and self.total:
            self._said = True
            logger.error(
                "The model computed NaN logits for %d token(s) so far; their answers are wrong. %s. The metric "
                "fastattention:nan_logits_total goes on counting.",
                self.total,
                CAUSES.get(logits.dtype, OTHER_CAUSE),
            )


count = NanCount()


def install() -> None:
    """Count in every engine that uses this backend. Repeated calls are safe."""
    once_imported("vllm.model_executor.layers.logits_processor", count_logits)


def count_logits(module: Any) -> None:
    kind = module.LogitsProcessor
    if hasattr(kind, "_fastattention"):
        return
    create, compute = kind.__init__, kind.forward

    @functools.wraps(create)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        from vllm.config import get_current_vllm_config_or_none

        create(self, *arguments, **named)
        config = get_current_vllm_config_or_none()
        self._fastattention_counts = config and config.attention_config.backend is compat.ensure_backend_member()

    @functools.wraps(compute)
    def forward(self: Any, *arguments: Any, **named: Any) -> torch.Tensor | None:
        logits: torch.Tensor | None = compute(self, *arguments, **named)
        # vLLM's layer for adapters calls this with itself. It wraps the model's own layer.
        if logits is not None and getattr(self, "base_layer", self)._fastattention_counts:
            count.add(logits)
        return logits

    kind._fastattention = True
    kind.__init__, kind.forward = __init__, forward
