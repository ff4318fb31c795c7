"""This vLLM has the recorded options, and no question to our backends is answered by vLLM's own classes."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fastattention_vllm.integration import claims
from fastattention_vllm.integration.cpu import backend
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.host_layers.metadata import HostMetadataBuilder

OURS = {
    backend.FastAttentionBackend: "backend",
    backend.HostLayerBackend: "backend",
    backend.FastAttentionImpl: "impl",
    host_layers.HostLayerImpl: "impl",
    backend.FastAttentionMetadataBuilder: "builder",
    HostMetadataBuilder: "builder",
}


def surface() -> ModuleType:
    """Import scripts/vllm_surface.py by its path, because `tests` must be upstream's package and not ours."""
    path = Path(__file__).resolve().parents[2] / "scripts" / "vllm_surface.py"
    spec = importlib.util.spec_from_file_location("vllm_surface", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_installed_options_are_the_recorded_ones() -> None:
    names, version = surface(), metadata.version("vllm").partition("+")[0]
    recorded = names.recorded(version)
    assert recorded is not None, f"record vLLM {version} with scripts/vllm_surface.py"
    assert names.differences(recorded, names.installed()) == []


@pytest.mark.parametrize("ours", OURS, ids=lambda ours: ours.__name__)
def test_every_answer_is_our_own(ours: type[Any]) -> None:
    for name in claims.CLAIMS[OURS[ours]]:
        owner = next((one for one in ours.__mro__ if name in vars(one)), ours)
        assert owner.__module__.startswith("fastattention_vllm."), f"{name} is answered by {owner.__qualname__}"
