"""What attention computes: one problem description and the kernel families that solve it."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def kernels_for(device: torch.device) -> ModuleType:
    """The kernel family (a module with ``can_run`` and ``run``) for ``device``; ``ValueError`` if there is none."""
    if device.type == "cpu":
        from fastattention_vllm.attention import cpu

        return cpu
    raise ValueError(f"No attention kernels for device {device}; available: cpu.")
