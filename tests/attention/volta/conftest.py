"""What the launcher reads of compiled images, without any: nothing is compiled for tests that do not run kernels."""

from __future__ import annotations

import pytest

from tests.attention.volta import simulated_gpu


@pytest.fixture(autouse=True)
def described_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated_gpu.describe_kernels(monkeypatch)
