"""The kernel families and the one protocol that they all follow; which family computes on which device.

To add a device: write a module with the three functions of :class:`Kernels`, and add a :class:`Family` to ``FAMILIES``.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from fastattention_vllm.attention.problem import AttentionProblem


class StoresKv(Protocol):
    """Kernels that store new keys and values in pages."""

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        """Write new rows ``[num_tokens, num_kv_heads, head_size]`` into pages ``[num_blocks, page_size, num_kv_heads,
        head_size]``; a negative slot leaves its token out."""


class Kernels(StoresKv, Protocol):
    """What a kernel family provides. A module with these names is one."""

    @property
    def ANY_PAGE_SIZE(self) -> bool:
        """Whether one page may hold a whole sequence of any length, so that batches of any strides need no copy."""

    def can_run(self, problem: AttentionProblem) -> str | None:
        """Why these kernels cannot compute ``problem``, in one sentence; ``None`` if they can."""

    def run(
        self,
        problem: AttentionProblem,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute ``problem`` on its query's device, in the order of the work there.

        ``out``: ``[num_tokens, num_heads, head_size]`` in the query's dtype; allocated if absent.
        ``lse``: ``[num_tokens, num_heads]`` fp32, natural logarithm; allocated if absent and ``return_lse``.
        Rows of padding in tensors that were passed in stay as they are.

        Raises ``ValueError`` for what :meth:`can_run` names.
        """


@dataclass(frozen=True)
class Device:
    """What the choice of a family depends on."""

    kind: str
    """torch's device type."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability of an NVIDIA GPU."""
    vllm_flash: bool = False
    """Whether the installed vLLM contains compiled FlashAttention."""


@dataclass(frozen=True)
class Family:
    name: str
    title: str
    """For people."""
    serves: Callable[[Device], bool]
    load: Callable[[], Kernels]
    """Imports the module, with whatever it needs."""


def _cpu() -> Kernels:
    from fastattention_vllm.attention.cpu import kernels

    return kernels


def _volta() -> Kernels:
    from fastattention_vllm.attention.volta import kernels

    return kernels


def _flash() -> Kernels:
    from fastattention_vllm.attention import flash

    return flash


def _torch_flash() -> Kernels:
    from fastattention_vllm.attention import torch_flash

    return torch_flash


def _ascend() -> Kernels:
    from fastattention_vllm.attention import ascend

    return ascend


def _ascend_triton() -> Kernels:
    from fastattention_vllm.attention.ascend_triton import kernels

    return kernels


OLDEST_GPU = (7, 0)
FLASH_GPU = (8, 0)
"""The first compute capability that FlashAttention 2 supports."""


def _is_gpu(device: Device, first: tuple[int, int], below: tuple[int, int] | None = None) -> bool:
    if device.kind != "cuda" or device.capability is None:
        return False
    return device.capability >= first and (below is None or device.capability < below)


FAMILIES = (
    Family("cpu", "CPU kernels of this package", lambda device: device.kind == "cpu", _cpu),
    Family(
        "volta", "V100 and T4 kernels of this package", lambda device: _is_gpu(device, OLDEST_GPU, FLASH_GPU), _volta
    ),
    Family("flash", "vLLM's FlashAttention", lambda device: _is_gpu(device, FLASH_GPU) and device.vllm_flash, _flash),
    Family("torch_flash", "PyTorch's FlashAttention", lambda device: _is_gpu(device, FLASH_GPU), _torch_flash),
    Family("ascend", "torch_npu's fused attention", lambda device: device.kind == "npu", _ascend),
    Family(
        "ascend_triton", "Triton kernels of this package for NPUs", lambda device: device.kind == "npu", _ascend_triton
    ),
)
"""The first one that serves a device is used, unless an option names another (``ascend_kernel``)."""


def family_of(device: Device) -> Family:
    """The kernel family for ``device``.

    Raises:
        ValueError: there is none.
    """
    for family in FAMILIES:
        if family.serves(device):
            return family
    if device.kind == "cuda" and device.capability is not None:
        major, minor = device.capability
        raise ValueError(
            f"No attention kernels for a GPU of compute capability {major}.{minor}; "
            f"{OLDEST_GPU[0]}.{OLDEST_GPU[1]} (V100) or newer is needed. Move the tensors to the CPU."
        )
    raise ValueError(f"No attention kernels for device {device.kind}; available: cpu, cuda, npu.")


def kernels_for(device: torch.device) -> Kernels:
    """The kernels for ``device``; the same ones each time.

    Raises:
        ValueError: there are none.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return family_of(Device(device.type, capability, device.type == "cuda" and vllm_has_flash())).load()


@functools.cache
def vllm_has_flash() -> bool:
    """Whether the installed vLLM contains compiled FlashAttention; found without importing vLLM."""
    found = importlib.util.find_spec("vllm")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    return any(any(Path(folder, "vllm_flash_attn").glob("_vllm_fa*.so")) for folder in folders)
