"""Logits that are not numbers are counted in every engine of this backend, and said once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastattention_vllm.integration.serving import nan_logits
from fastattention_vllm.integration.serving.nan_logits import CAUSES, OTHER_CAUSE, NanCount
from tests import reference_models as models
from tests.integration.engine import NGRAM, engine, generate

PROMPTS = models.random_prompts([3, 20])


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors of this package's log."""
    lines: list[str] = []
    monkeypatch.setattr(nan_logits.logger, "error", lambda text, *values: lines.append(text % values))
    return lines


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> NanCount:
    """A count of this test's own."""
    own = NanCount()
    monkeypatch.setattr(nan_logits, "count", own)
    return own


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_with_a_nan_are_counted(dtype: torch.dtype, said: list[str]) -> None:
    count = NanCount()
    whole = torch.randn(3, 1000).to(dtype)
    whole[1, 5], whole[2, 7] = float("inf"), -float("inf")
    count.add(whole)
    count.add(whole[:0])
    assert count.total == 0
    assert not said
    for rows in ([0], [0, 2]):
        broken = whole.clone()
        broken[rows, 999] = float("nan")
        broken[rows, 3] = float("inf")
        count.add(broken)
    assert count.total == 3
    assert len(said) == 1
    assert "NaN logits for 1 token(s)" in said[0]
    assert CAUSES.get(dtype, OTHER_CAUSE) in said[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_random(models.llama(4, 2, 32, 2), tmp_path_factory.mktemp("nan"))


@pytest.fixture(scope="module")
def damaged(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a NaN in its last norm."""
    folder = tmp_path_factory.mktemp("damaged")
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("options", [{}, {"enable_lora": True}], ids=["plain", "adapters"])
def test_every_token_of_a_damaged_model_is_counted(
    damaged: Path, options: dict[str, Any], count: NanCount, said: list[str]
) -> None:
    with engine(damaged, **options) as llm:
        before = count.total  # those of vLLM's own runs at start
        generate(llm, PROMPTS, 5)
        assert count.total == before + 10
        (stats,) = llm.collective_rpc("fastattention_stats")
    assert stats["nan_logits"] == count.total
    assert len(said) == 1
    assert OTHER_CAUSE in said[0]


def test_a_sound_model_has_none(model: Path, count: NanCount, said: list[str]) -> None:
    with engine(model, speculative_config=NGRAM) as llm:
        generate(llm, models.repeating_prompts(), 5)
    assert count.total == 0
    assert not said
