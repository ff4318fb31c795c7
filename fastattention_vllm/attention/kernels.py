"""The kernel families: what each of them offers, and which one computes on which device.

A new device adds a function and a row of ``FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from fastattention_vllm.attention.problem import AttentionProblem


class Kernels(Protocol):
    """The attention kernels of one device family: a module with these two functions.

    Families whose layers derive from ``integration/base.py``, and those of host layers, also have ``write_kv``, which
    stores new keys and values in the paged cache.
    """

    def can_run(self, problem: AttentionProblem) -> str | None:
        """Why these kernels cannot compute ``problem``, in one sentence; ``None`` if they can."""

    def run(self, problem: AttentionProblem, *, return_lse: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute ``problem`` on its query's device.

        ``out``: ``[num_tokens, num_heads, head_size]`` in the query's dtype; ``lse``: ``[num_tokens, num_heads]`` fp32.

        Raises:
            ValueError: for what :meth:`can_run` names.
        """


def _cpu(device: torch.device) -> Kernels:
    from fastattention_vllm.attention.cpu import kernels

    return kernels


def _cuda(device: torch.device) -> Kernels:
    """vLLM's FlashAttention from compute capability 8.0 on, our own kernels below."""
    import torch

    from fastattention_vllm.attention import flash
    from fastattention_vllm.attention.volta import kernels as volta

    return flash if torch.cuda.get_device_capability(device) >= (8, 0) else volta


def _npu(device: torch.device) -> Kernels:
    from fastattention_vllm.attention import ascend

    return ascend


FAMILIES: dict[str, Callable[[torch.device], Kernels]] = {"cpu": _cpu, "cuda": _cuda, "npu": _npu}
"""By torch's device type: the kernels for a device of this type, imported when they are first needed."""


def kernels_for(device: torch.device) -> Kernels:
    """The kernel family for ``device``.

    Raises:
        ValueError: there is none.
    """
    family = FAMILIES.get(device.type)
    if family is None:
        raise ValueError(f"No attention kernels for device {device}; available: {', '.join(FAMILIES)}.")
    return family(device)
