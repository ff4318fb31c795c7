"""``ascend_kernel: "triton"`` inside genuine vllm-ascend: its metadata and caches, in Triton's interpreter.

Triton becomes importable after vllm-ascend is imported: vllm-ascend's own Triton kernels ask for an NPU at import.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from fastattention_vllm.attention.ascend_triton import compilation, kernels
from fastattention_vllm.integration.refusal import Refusal
from tests.ascend import operator as ascend_operator
from tests.ascend.test_vllm_ascend import STEPS, Engine, config  # noqa: F401  a fixture
from tests.attention.ascend_triton.interpreter import teach_bf16

STEP = {"float16": 2**-10, "bfloat16": 2**-7}
"""The output and each weight are rounded once."""


@pytest.fixture(autouse=True)
def triton_kernels(config: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.syspath_prepend(os.environ["FASTATTENTION_TRITON"])
    teach_bf16(monkeypatch)
    config.additional_config = {"fastattention": {"ascend_kernel": "triton"}}


@pytest.mark.parametrize(("steps", "window"), [("prefill", None), ("mixed", None), ("mixed", 40)])
def test_equals_float64(config: SimpleNamespace, steps: str, window: int | None) -> None:  # noqa: F811
    engine = Engine(config, heads=2, kv_heads=1, size=64, window=window)
    assert engine.impl.kernels_name == "fastattention Triton"
    ascend_operator.calls.clear()
    for new in STEPS[steps]:
        computed, expected = engine.step(new)
        size = max(1.0, float(expected.abs().max()))
        assert float((computed.double() - expected).abs().max()) <= STEP["bfloat16"] * size
    assert not ascend_operator.calls


def test_padding_of_parallel_layers_is_left_alone(config: SimpleNamespace) -> None:  # noqa: F811
    engine = Engine(config, heads=2, kv_heads=1, size=64)
    engine.step({0: 9, 1: 30})
    computed, expected = engine.step({0: 1, 1: 4}, padding=3)
    assert float((computed[:5].double() - expected).abs().max()) <= STEP["bfloat16"] * float(expected.abs().max())
    assert (computed[5:] == -7.0).all()


@pytest.mark.parametrize(
    ("mode", "runs"), [(CUDAGraphMode.NONE, True), (CUDAGraphMode.PIECEWISE, True), (CUDAGraphMode.FULL, False)]
)
def test_captured_attention_stops_the_start(config: SimpleNamespace, mode: Any, runs: bool) -> None:  # noqa: F811
    config.compilation_config.cudagraph_mode = mode
    if runs:
        Engine(config)
        return
    with pytest.raises(Refusal, match="cudagraph_mode FULL captures attention"):
        Engine(config)


def test_a_head_size_without_kernels_stops_the_start(config: SimpleNamespace) -> None:  # noqa: F811
    with pytest.raises(
        Refusal, match=r'ascend_kernel is "triton", but the head size is 80.*set ascend_kernel to "fused"'
    ):
        Engine(config, size=80)


def test_without_triton_the_start_names_the_package(
    config: SimpleNamespace,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Refusal, match="triton-ascend is not installed"):
        Engine(config)


@pytest.mark.parametrize("works", [True, False])
def test_kernels_are_compiled_once_after_the_weights_are_loaded(
    config: SimpleNamespace,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    works: bool,
) -> None:
    from fastattention_vllm.integration.ascend import (
        backend,
        kernel_choice,
    )  # after vllm_ascend, as its tests import it

    compiled: list[tuple[Any, ...]] = []

    def compile_programs(*arguments: Any) -> None:
        compiled.append(arguments[:3])
        if not works:
            raise RuntimeError("prefill bf16 D64 rows 128 could not be compiled (OSError: no compiler)")

    monkeypatch.setattr(compilation, "compile_programs", compile_programs)
    monkeypatch.setattr(backend, "AscendRuntime", lambda *arguments: None)  # which asks for the NPU
    monkeypatch.setattr(backend.host_layers, "set_up", lambda *arguments: None)
    kernel_choice.compile_at_start.cache_clear()
    engines = [Engine(config, heads=4, kv_heads=2, size=64) for _ in range(2)]
    for engine in engines:
        if works:
            engine.impl.process_weights_after_loading(engine.dtype)
            continue
        with pytest.raises(Refusal, match=r'no compiler\); set ascend_kernel to "fused"'):
            engine.impl.process_weights_after_loading(engine.dtype)
    assert compiled == [(engines[0].dtype, 64, 2)] * (1 if works else 2)
