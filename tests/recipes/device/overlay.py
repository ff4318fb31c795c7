"""The recipe "add a device", followed: the new files stand in fastattention_vllm/ beside this file, the rows below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import fastattention_vllm.attention
import fastattention_vllm.integration
from fastattention_vllm.attention.kernels import FAMILIES, Kernels
from fastattention_vllm.integration import compat

FILES = Path(__file__).resolve().parent / "fastattention_vllm"
BACKEND = "fastattention_vllm.integration.dummy.backend.FastAttentionDummyBackend"


def _dummy(device: torch.device) -> Kernels:
    from fastattention_vllm.attention import dummy  # type: ignore[attr-defined]

    kernels: Kernels = dummy
    return kernels


ROOMS: Sequence[ModuleType] = (fastattention_vllm.attention, fastattention_vllm.integration)
ROWS: Sequence[tuple[dict[str, Any], str, Any]] = (
    (FAMILIES, "cpu", _dummy),  # the dummy device's tensors are the host's, so it takes the place of the CPU
    (compat.BACKENDS, "dummy", BACKEND),
)


def add_files() -> None:
    for room in ROOMS:
        room.__path__ = [*room.__path__, str(FILES / room.__name__.rpartition(".")[2])]


def add_rows() -> None:
    for table, name, value in ROWS:
        table[name] = value
