"""Times that the model of the 910B predicts for the Triton programs. Run by `make test-ascend`."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("ascendnpuir") is None or importlib.util.find_spec("tilesim") is None:
    pytest.skip("needs ascendnpu-ir and msopmodeling: `make test-ascend` installs them", allow_module_level=True)

from fastattention_vllm.attention.ascend_triton import specializations
from fastattention_vllm.attention.ascend_triton.specializations import Specialization
from scripts import ascend_predict

HALF = [one for one in specializations.every() if one.dtype == "fp16"]
"""Programs for bf16 have the same flags and nearly the same times."""


@pytest.mark.parametrize("one", HALF, ids=lambda one: one.name)
def test_every_program_ends_with_all_flags_used(one: Specialization) -> None:
    for call in (ascend_predict.usual_call(one), ascend_predict.call_of_every_flag(one)):
        assert ascend_predict.predict(one, call).left_over == 0


@pytest.mark.parametrize("one", [one for one in HALF if one.head_size in (128, 256)], ids=lambda one: one.name)
def test_every_flag_that_is_taken_out_is_noticed(one: Specialization) -> None:
    """`python -m scripts.ascend_predict --flags` does it for all programs."""
    assert list(ascend_predict.unnoticed_flags(one)) == []


def test_a_line_per_program_says_that_it_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    one = Specialization("prefill", "fp16", 128, 128)
    line = ascend_predict.described(one, "910B4")
    assert line.startswith(f"{one.name}: predicted ")
    assert "AIC FIX" in line
    assert "UB 178 KiB" in line


def test_the_last_program_ends_the_step() -> None:
    assert ascend_predict.makespan([5, 4, 3, 3, 3], 2) == 10
    assert ascend_predict.makespan([], 2) == 0
