"""Gives the launcher a manifest without any images, so that tests that run no kernels need not compile."""

from __future__ import annotations

import pytest

from tests.attention.volta import simulated_gpu


@pytest.fixture(autouse=True)
def described_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated_gpu.describe_kernels(monkeypatch)
