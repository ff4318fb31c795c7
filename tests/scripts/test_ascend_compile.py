"""Every Triton program that the plugin can ask for is compiled for every 910B, without an NPU and without CANN.

Run by `make test-ascend`, which installs the compiler.
"""

from __future__ import annotations

import importlib.util

import pytest

from fastattention_vllm.attention.ascend_triton import specializations
from fastattention_vllm.attention.ascend_triton.specializations import Specialization
from scripts import ascend_compile, ascend_predict

if importlib.util.find_spec("ascendnpuir") is None:
    pytest.skip("needs ascendnpu-ir: `make test-ascend` installs it", allow_module_level=True)

EVERY = list(specializations.every())
CAPACITY = {"UB": 192 * 1024, "L1": 512 * 1024, "L0C": 128 * 1024}
RUN_AHEAD = 4
"""Marks of pipelined loops that the compiler leaves in each program, as observed; 0 if nothing runs ahead."""


@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.name)
@pytest.mark.parametrize("chip", ascend_compile.CHIPS)
def test_is_accepted_and_keeps_all_cores_busy(chip: str, one: Specialization) -> None:
    compiled = ascend_predict.compiled(one, chip.removeprefix("Ascend"))
    assert not compiled.refusal
    for core in compiled.cores.values():
        assert all(core.memory[space] <= CAPACITY[space] for space in core.memory)
    if one.program == "combine":
        assert set(compiled.cores) == {"AIV"}
        return
    assert set(compiled.cores) == {"AIC", "AIV"}
    assert compiled.cores["AIV"].on_both
    assert [core.run_ahead for core in compiled.cores.values()] == [RUN_AHEAD, RUN_AHEAD]


def test_a_tile_that_does_not_fit_is_refused() -> None:
    one = Specialization("prefill", "fp16", 256, 128)
    assert "ub overflow" in ascend_predict.compiled(one).refusal


def test_without_workspace_for_several_blocks_nothing_runs_ahead() -> None:
    one = Specialization("prefill", "fp16", 128, 128)
    options = one.options | {"set_workspace_multibuffer": 1}
    compiled = ascend_compile.compile_for(ascend_compile.CHIPS[0], ascend_predict.linalg(one), options)
    assert not compiled.refusal
    assert [core.run_ahead for core in compiled.cores.values()] == [0, 0]
