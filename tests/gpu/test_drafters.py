"""Drafters with host layers: their layers stay on the device, and the answers are those without them.

A draft model that is the model itself proposes its answers, so that its drafts are accepted. Heads with random weights
are almost never right. Each engine answers twice, the second time with cached prefixes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fastattention_vllm.integration.host_layers import layers as host_layers
from tests import drafters
from tests import reference_models as reference
from tests.gpu.apart import apart
from tests.gpu.test_decode_graph import ask
from tests.gpu.test_engine import GPU, Steps, check
from tests.integration.engine import counter, engine
from tests.reference_models import random_prompts, save_random

LAYERS = 3  # vLLM gives EAGLE-3 the states after layers 2, LAYERS / 2 and LAYERS - 3, which must differ
TOKENS = 24
LENGTHS = (1, 17, 130, 300, 900)
HOST = 2
HEADS: dict[str, tuple[Callable[[Path, Path], Path], int]] = {
    "draft_model": (lambda target, path: target, LAYERS),
    "eagle": (drafters.save_eagle, 1),
    "eagle3": (drafters.save_eagle3, 1),
}
"""How each is made, and its layers."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(reference.llama(8, 2, 128, layers=LAYERS), tmp_path_factory.mktemp("llama"))


class Answered(NamedTuple):
    first: list[Steps]
    again: list[Steps]
    draft_layers: int
    drafted: float
    accepted: float


def answered(path: Path, prompts: list[list[int]], changes: dict[str, Any]) -> Answered:
    with engine(path, **(GPU | {"enable_prefix_caching": True} | changes)) as llm:
        first, again = ask(llm, prompts, TOKENS), ask(llm, prompts, TOKENS)
        placed = host_layers.find(llm.llm_engine.vllm_config)
        assert placed is not None
        counts = (counter(llm, f"vllm:spec_decode_num_{what}_tokens") for what in ("draft", "accepted"))
        return Answered(first, again, placed.placement.device_size.draft_layers, *counts)


@pytest.mark.parametrize("kernels", [{}, {"volta_kernels": "ptx"}], ids=["flash", "volta"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("method", HEADS)
def test_drafts_change_no_answer(
    method: str, eager: bool, kernels: dict[str, Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method.startswith("eagle") and not eager and not kernels:
        # Up to 0.24 the second runner captures a head's graphs with stale metadata of FlashAttention 3 (vLLM 47561).
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    save, layers = HEADS[method]
    drafter = {"method": method, "model": str(save(model, tmp_path / method)), "num_speculative_tokens": 3}
    alike = {"enforce_eager": eager, "additional_config": {"fastattention": kernels | {"host_kv_layers": HOST}}}
    prompts = random_prompts(LENGTHS)
    plain = apart(answered, model, prompts, alike)
    found = apart(answered, model, prompts, alike | {"speculative_config": drafter})
    check(found.first, plain.first)
    check(found.again, plain.first)
    assert (plain.draft_layers, found.draft_layers) == (0, layers)
    assert found.drafted > 0
    if method == "draft_model":
        assert found.accepted > 0.8 * found.drafted
