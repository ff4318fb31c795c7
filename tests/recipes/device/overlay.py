"""The recipe "add a device", followed: the new files stand in fastattention_vllm/ beside this file, the rows below."""

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


ROOMS: Sequence[ModuleType] = (fastattention_vllm.attention, fastattention_vllm.integration)
FAMILY = kernels.Family("dummy", "the dummy device's kernels", lambda device: device.kind == "cpu", _dummy)
"""The row of ``FAMILIES``. The dummy device's tensors are the host's, so it stands before the CPU's row."""
BACKEND = "fastattention_vllm.integration.dummy.backend.FastAttentionDummyBackend"
"""The row of ``BACKENDS``, for the platform "dummy"."""


def add_files() -> None:
    for room in ROOMS:
        room.__path__ = [*room.__path__, str(FILES / room.__name__.rpartition(".")[2])]


def families() -> tuple[kernels.Family, ...]:
    return (FAMILY, *kernels.FAMILIES)


def backends() -> dict[str, str]:
    return {**compat.BACKENDS, "dummy": BACKEND}
