"""8-bit keys and values in the V100's kernels: writing, reading, and attention over them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.volta.launch import HEAD_SIZES, TURING, VOLTA
from tests.attention.oracle import Case
from tests.kernels.volta import attention
from tests.kernels.volta.attention import emulated, simulated
from tests.kernels.volta.machine import full, more

FP16, E5M2, E4M3 = torch.float16, torch.float8_e5m2, torch.float8_e4m3fn
DTYPES = [E5M2, E4M3, torch.int8]
SCALES = {E5M2: (0.5, 2.0), E4M3: (0.3, 0.7), torch.int8: (1 / 40, 1 / 30)}
"""Scales for keys and values of about 1, so that integers are not all 0."""


def name(value: object) -> str:
    return getattr(value, "__name__", str(value))


def cast(rows: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Torch's own rounding, limited to the largest number; integers have no NaN."""
    divided = rows.float() / scale
    if dtype == torch.int8:
        return divided.nan_to_num(0.0, 1e9, -1e9).round().clamp(-128, 127).to(dtype)
    largest = torch.finfo(dtype).max
    return divided.clamp(-largest, largest).to(dtype)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit; all NaN are equal."""
    nan = torch.isnan(expected.float())
    assert (torch.isnan(found.float()) == nan).all()
    bits = torch.int16 if expected.itemsize == 2 else torch.uint8
    assert (found.view(bits)[~nan] == expected.view(bits)[~nan]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("on", "step"), [(emulated, 1), (simulated, 7), more(simulated, 1)], ids=name)
def test_every_fp16_number_is_cast_as_torch_does(on: attention.Machines, step: int, dtype: torch.dtype) -> None:
    """All numbers of fp16, or every seventh, divided by two scales: infinity and NaN, subnormal numbers, ties."""
    numbers = torch.arange(1 << 16, dtype=torch.int32)[::step]
    numbers = numbers[: len(numbers) // 512 * 512].to(torch.int16).view(FP16).view(-1, 8, 64)
    key_cache, value_cache = torch.zeros(2, 1, len(numbers), 8, 64).to(dtype)
    scales = (1.0, 0.3)
    attention.write_kv(numbers, numbers, key_cache, value_cache, torch.arange(len(numbers)), scales, on)
    for written, scale in zip((key_cache, value_cache), scales, strict=True):
        assert_same(written[0], cast(numbers, dtype, scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("on", [emulated, more(simulated)], ids=name)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_every_8_bit_number_is_read_exactly(kind: str, on: attention.Machines, dtype: torch.dtype) -> None:
    """There is one key for each row, so its weight is 1 and the output is the value.

    Prefill repeats the last key in its last tile, with a weight of 0. An infinite value therefore becomes NaN, as in
    any kernel for rows that share a tile with it but do not see it.
    """
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).view(1, 4, 64)
    problem = Case((1,), (1,), 8, 4, 64, 0, FP16, dtype).build()
    rows = torch.zeros(1, 4, 64).to(dtype)
    problem = replace(problem, key=rows, value=every, kv_start_loc=torch.zeros(1, dtype=torch.int32))
    compute: Callable[..., Any] = attention.prefill if kind == "prefill" else attention.decode
    out, _ = compute(problem, on)
    expected = every.to(FP16).repeat_interleave(2, 1)
    if kind == "prefill":
        expected[expected.isinf()] = torch.nan
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def case(dtype: torch.dtype, kind: str, head_size: int = 64, **changes: Any) -> Case:
    key_scale, value_scale = SCALES[dtype]
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    own: dict[str, Any] = scales | {"head_size": head_size, "dtype": FP16, "kv_dtype": dtype} | changes
    if kind == "prefill":
        return Case((70, 3), (150, 33), 6, 2, padding=2, **own)
    return Case((2, 1), (300, 1), 8, 2, **own) if kind == "decode" else Case((5, 1), (300, 1), 12, 2, **own)


EVERYTHING = {"window": (90, -1), "softcap": 3.0, "alibi": "shared", "sinks": 1.0, "layout": "NHD"}


@pytest.mark.parametrize("dtype", [E4M3, more(E5M2), more(torch.int8)], ids=str)
@pytest.mark.parametrize("head_size", [size if size == 64 else more(size) for size in HEAD_SIZES])
@pytest.mark.parametrize(("kind", "changes"), [("prefill", {}), ("decode", {}), full("prefill", EVERYTHING)])
def test_attention(kind: str, changes: dict[str, Any], head_size: int, dtype: torch.dtype) -> None:
    """The shipped kernels; a prompt's keys are split into two parts."""
    problem = case(dtype, kind, head_size, **changes).build()
    attention.check(problem, attention.prefill(problem, count=2) if kind == "prefill" else attention.decode(problem))


@pytest.mark.more
@pytest.mark.parametrize("head_size", [112, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loops_of_prefill_do_not_access_spilled_registers(dtype: torch.dtype, head_size: int) -> None:
    """Only these variants may spill (kernels/volta/build.py). They must not spill more often for twice the keys."""

    def spilled(keys: int) -> int:
        problem = replace(case(dtype, "prefill", head_size), q_lens=(64,), kv_lens=(keys,)).build()
        simulation = attention.launch_prefill(problem)[0]
        trace = simulation.trace(0)
        local = [i for i, facts in enumerate(simulation.instructions) if re.search(r"\b(LDL|STL)\b", facts.text)]
        return sum(int(trace.executions[i]) for i in local)

    assert spilled(300) == spilled(600)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("architecture", [VOLTA, more(TURING)])
@settings(max_examples=8)
@given(st.data())
def test_drawn_problems(kind: str, architecture: int, dtype: torch.dtype, data: st.DataObject) -> None:
    changes = {name: data.draw(st.sampled_from([value, None])) for name, value in EVERYTHING.items()}
    changes = {name: value for name, value in changes.items() if value is not None}
    changes["page_size"] = data.draw(st.sampled_from([0, 16, 784]))
    problem = case(dtype, kind, **changes).build()
    compute: Callable[..., Any] = attention.prefill if kind == "prefill" else attention.decode
    attention.check(problem, compute(problem, emulated, architecture=architecture))


@pytest.mark.parametrize(("dtype", "scale"), [(FP16, 1.0), (E5M2, 0.125), (E4M3, 100.0)], ids=str)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_parts_of_large_values(kind: str, dtype: torch.dtype, scale: float) -> None:
    """Means of parts are stored in fp16 without the scale of values, so they are as large as the stored values."""
    tokens = 20 if kind == "prefill" else 2
    problem = Case((tokens,), (300,), 4, 1, 64, 16, FP16, dtype, value_scale=scale).build()
    largest = min(60000.0, torch.finfo(dtype).max)
    problem.value.copy_(torch.full(problem.value.shape, largest).to(dtype))
    out, _ = attention.prefill(problem, emulated, 2) if kind == "prefill" else attention.decode(problem, emulated)
    torch.testing.assert_close(out.float(), torch.full_like(out.float(), largest * scale), rtol=1e-3, atol=0)
