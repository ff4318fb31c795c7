"""Sampling by ``top_k`` alone. tests/integration/test_speculation.py has the engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.sample.ops import topk_topp_sampler

from fastattention_vllm.integration.cpu.stand_ins import sampling


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's function, in place of which this package's may stand already."""
    replaced: Any = topk_topp_sampler.apply_top_k_only
    cells = getattr(replaced, "__closure__", None) if replaced.__module__ == sampling.__name__ else None
    found = cells[0].cell_contents if cells else replaced
    monkeypatch.setattr(topk_topp_sampler, "apply_top_k_only", found)
    sampling.let_steps_without_drafts_pass()
    sampling.let_steps_without_drafts_pass()
    return found


def test_rows_are_sampled_as_before(original: Any) -> None:
    logits, k = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 3, 40, 7, 39])
    expected = original(logits.clone(), k.clone())
    assert torch.equal(topk_topp_sampler.apply_top_k_only(logits.clone(), k.clone()), expected)
    assert (expected > -torch.inf).sum(dim=1).tolist() == k.tolist()


def test_no_rows_are_no_error(original: Any) -> None:
    logits, k = torch.empty(0, 40), torch.empty(0, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="numel"):  # otherwise nothing needs to be replaced
        original(logits, k)
    found = topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, None, allow_cpu_sync=True)
    assert found.shape == (0, 40)
