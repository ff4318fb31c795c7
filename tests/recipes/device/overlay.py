"""The recipe "add a device", followed: the new files are in fastattention_vllm/ beside this file, the rows below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import fastattention_vllm.attention
import fastattention_vllm.integration
from fastattention_vllm.attention import kernels
from fastattention_vllm.integration import compat

FILES = Path(__file__).resolve().parent / "fastattention_vllm"


def _dummy() -> kernels.Kernels:
    from fastattention_vllm.attention import dummy  # type: ignore[attr-defined]

    loaded: kernels.Kernels = dummy
    return loaded


PARENTS: Sequence[ModuleType] = (fastattention_vllm.attention, fastattention_vllm.integration)
FAMILY = kernels.Family("dummy", "the dummy device's kernels", lambda device: device.kind == "cpu", _dummy)
"""The row of ``FAMILIES``. It comes before the CPU's row, because the dummy device's tensors are on the host."""
BACKEND = "fastattention_vllm.integration.dummy.backend.FastAttentionDummyBackend"
"""The row of ``BACKENDS``, for the platform "dummy"."""


def add_files() -> None:
    for parent in PARENTS:
        parent.__path__ = [*parent.__path__, str(FILES / parent.__name__.rpartition(".")[2])]


def families() -> tuple[kernels.Family, ...]:
    return (FAMILY, *kernels.FAMILIES)


def backends() -> dict[str, str]:
    return {**compat.BACKENDS, "dummy": BACKEND}
