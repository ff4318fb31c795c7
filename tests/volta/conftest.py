"""What the launcher reads of compiled images, without any: nothing is compiled for tests that do not run kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastattention_vllm.attention.volta import kernels as volta
from fastattention_vllm.attention.volta.launch import Variant
from kernels.volta.variants import VARIANTS, describe


@pytest.fixture(autouse=True)
def described_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every folder had a manifest of all kernels."""
    ours = [Variant(**describe(one)) for one in VARIANTS]  # type: ignore[arg-type]
    table = {(one.kind, one.head_size, one.adjusted, one.cache, one.architecture): one for one in ours}

    def described(folder: Path) -> dict[tuple[str, int, bool, str, int], Variant]:
        return table

    monkeypatch.setattr(volta, "_described", described)
