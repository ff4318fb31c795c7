from __future__ import annotations

import pytest

from fastattention_vllm.bench import measure


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a millisecond and no waiting for an idle machine: these tests look at answers, not at times."""
    monkeypatch.setattr(measure, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(measure, "wait_for_quiet", lambda: None)
