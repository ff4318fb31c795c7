"""Tests that need an NVIDIA GPU of compute capability 8.0 or newer, and vLLM's CUDA build: ``make test-gpu``."""

from __future__ import annotations

import pytest
import torch

from tests.placement.conftest import exact_weights  # noqa: F401

NO_GPU = "needs an NVIDIA GPU of compute capability 8.0 or newer"


def has_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    if not has_gpu():
        pytest.skip(NO_GPU)
