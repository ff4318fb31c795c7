from __future__ import annotations

import pytest

from fastattention_vllm.bench import measure


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a millisecond, without waiting for an idle machine: these tests check results, not times."""
    monkeypatch.setattr(measure, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(measure, "wait_for_quiet", lambda: None)
