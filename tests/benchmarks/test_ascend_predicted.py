"""Predicted times of whole steps, computed parts against simulated ones. Run by `make test-ascend`."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

if importlib.util.find_spec("ascendnpuir") is None or importlib.util.find_spec("tilesim") is None:
    pytest.skip("needs ascendnpu-ir and msopmodeling: `make test-ascend` installs them", allow_module_level=True)

import ascend_predicted
import ascend_predicted_forms as forms
from ascend_predicted import HEADS, ONE_LEVEL, PREFILL, TWO_LEVEL

from fastattention_vllm.attention.ascend_triton.masks import UNLIMITED
from kernels.ascend.tables import CHIPS
from scripts import ascend_calls


@pytest.mark.parametrize("number", [49, 62, 63])
def test_late_tiles_are_extrapolated_exactly(number: int) -> None:
    call = ascend_calls.prefill(HEADS, 8192, number, PREFILL.rows, causal=True)
    simulated = forms.run(TWO_LEVEL, call).cycles
    assert forms.tile_cycles(TWO_LEVEL, HEADS, number, "910B1", UNLIMITED) == pytest.approx(simulated, rel=0.003)


def test_long_tiles_are_extrapolated_exactly() -> None:
    simulated = forms.whole_tile(TWO_LEVEL, HEADS, 96).cycles
    assert forms.full_cycles(TWO_LEVEL, HEADS, 96, "910B1") == pytest.approx(simulated, rel=0.003)


def test_a_window_costs_no_more_in_a_late_tile() -> None:
    call = ascend_calls.prefill(HEADS, 8192, 61, PREFILL.rows, causal=True, window=1023)
    simulated = forms.run(TWO_LEVEL, call).cycles
    assert forms.tile_cycles(TWO_LEVEL, HEADS, 61, "910B1", 1023) == pytest.approx(simulated, rel=0.003)


def test_the_forms_differ_in_what_their_names_say() -> None:
    ahead = {
        form.name: max(core.run_ahead for core in form.compiled.cores.values()) for form in ascend_predicted.TILINGS
    }
    assert [name for name, marks in ahead.items() if marks] == ["512 keys, running ahead", "128 keys, running ahead"]
    two, one = (forms.whole_tile(form, HEADS, 64) for form in (TWO_LEVEL, ONE_LEVEL))
    per_page = PREFILL.rows * PREFILL.head_size * 4
    # One result of 128 rows per page of scores, and one per block of products with values.
    assert (one.moved["from L0C"], two.moved["from L0C"]) == (64 * 2 * per_page, 64 * 1.25 * per_page)


def test_rates_count_what_is_seen() -> None:
    heads = replace(HEADS, query=1)
    assert forms.prefill_flops(heads, 4, causal=False) == 4 * 128 * 16
    assert forms.prefill_flops(heads, 4, causal=True) == 4 * 128 * 10
    assert forms.prefill_flops(heads, 4, causal=True, window=1) == 4 * 128 * 7
    assert forms.decode_bytes(HEADS, 1000, 2) == 2 * 2 * 1000 * 8 * 128 * 2


def test_a_step_takes_as_long_as_its_rounds() -> None:
    cycles = forms.whole_tile(TWO_LEVEL, HEADS, 8).cycles
    rounds = -(-8 * 32 // 24)
    seconds = forms.prefill_seconds(TWO_LEVEL, HEADS, 1024, causal=False)
    assert seconds == pytest.approx(rounds * cycles / CHIPS["910B1"].mhz / 1e6)
