"""Packed weights: equal to those of the kernels' tests, and back."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.linear.volta import packing
from fastattention_vllm.linear.weights import QuantisedMatrix, WeightFormat
from kernels.volta import linear_problems
from tests.linear import oracle
from tests.linear.oracle import FORMATS

INT4, INT8 = WeightFormat("int4", "group", 64, True), WeightFormat("int8", "group", 64, True)
FP8 = WeightFormat("fp8_e4m3", "block")


def test_integers_are_packed_as_the_kernels_tests_pack_them() -> None:
    """Those have an implementation of their own."""
    rng = numpy.random.default_rng(0)
    for kind, most in (("int4", 16), ("int8", 256)):
        stored = rng.integers(0, most, (328, 72), dtype=numpy.uint8)
        per_word = 32 // (4 if kind == "int4" else 8)
        words = numpy.zeros((328 // per_word, 72), numpy.uint32)
        for place in range(per_word):
            words |= stored[place::per_word].astype(numpy.uint32) << numpy.uint32(32 // per_word * place)
        scales = rng.uniform(0.5, 1.5, (6, 72)).astype(numpy.float16)
        zeros = rng.integers(0, most, (6, 72), dtype=numpy.uint8)
        form = WeightFormat(kind, "group", 64, True)  # type: ignore[arg-type]
        numbers = torch.from_numpy(words.view(numpy.int32))
        given = QuantisedMatrix(form, 328, 72, numbers, torch.from_numpy(scales), torch.from_numpy(zeros))
        problem = linear_problems.Problem(kind, numpy.zeros((1, 328), numpy.float16), stored, scales, zeros, 64)
        found = packing.pack(given)
        expected = linear_problems.packed(stored, kind)
        units = packing.UNIT[kind] // per_word
        assert found.packed.shape == expected.shape
        full = slice(None, 328 // per_word // units)  # the last unit's end holds any weights
        assert numpy.array_equal(found.packed.numpy().view(numpy.uint32)[:, full], expected[:, full])
        assert numpy.array_equal(found.scales.numpy().view(numpy.uint32), linear_problems.packed_scales(problem))


def test_fp8_is_packed_as_the_kernels_tests_pack_it() -> None:
    given = oracle.matrix(FP8, 256, 264)
    stored = given.numbers.view(torch.uint8).contiguous().numpy()
    found = packing.pack(given)
    assert numpy.array_equal(found.packed.numpy().view(numpy.uint32), linear_problems.packed(stored, "e4m3"))
    assert torch.equal(found.scales, given.scales * 256)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data())
def test_unpack_is_the_inverse(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(FORMATS))
    k, n = 8 * data.draw(st.integers(1, 60)), 8 * data.draw(st.integers(1, 60))
    matrix = oracle.matrix(form, k, n, seed=data.draw(st.integers(0, 99)))
    weights = packing.pack(matrix)
    back = packing.unpack(weights)
    assert torch.equal(back.numbers.view(torch.uint8), matrix.numbers.view(torch.uint8))
    assert torch.equal(back.scales, matrix.scales)
    assert (back.zeros is None) == (matrix.zeros is None)
    assert back.zeros is None or matrix.zeros is None or torch.equal(back.zeros, matrix.zeros.int())


@pytest.mark.parametrize("form", [INT4, INT8, FP8], ids=str)
def test_slices_give_the_same(form: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = oracle.matrix(form, 328, 168)
    whole = packing.pack(matrix)
    monkeypatch.setattr(packing, "SLICE_BYTES", 3 * 8 * 384)  # less than a slice of 8 columns of FP8
    sliced = packing.pack(matrix)
    assert torch.equal(whole.packed, sliced.packed)


@pytest.mark.parametrize("form", [INT4, INT8, FP8], ids=str)
def test_any_strides(form: WeightFormat) -> None:
    matrix = oracle.matrix(form, 264, 136)
    expected = packing.pack(matrix)
    other = replace(matrix, numbers=matrix.numbers.t().contiguous().t(), scales=matrix.scales.t().contiguous().t())
    found = packing.pack(other)
    assert torch.equal(found.packed, expected.packed)
    assert torch.equal(found.scales, expected.scales)
    assert found.scales.is_contiguous()
    rows = replace(matrix, numbers=matrix.numbers.contiguous())
    assert torch.equal(packing.pack(rows).packed, expected.packed)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_default_dtype_changes_nothing(form: WeightFormat) -> None:
    """vLLM loads models with that of the model. The kernels read scales as fp32 whatever the tensor's dtype is."""
    matrix = oracle.matrix(form, 328, 72)
    expected = packing.pack(matrix)
    torch.set_default_dtype(torch.float16)
    try:
        found = packing.pack(matrix)
    finally:
        torch.set_default_dtype(torch.float32)
    for name in ("packed", "scales", "factor"):
        ours, wanted = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (wanted is None)
        if wanted is not None:
            assert ours.dtype == wanted.dtype
            assert torch.equal(ours, wanted)


@pytest.mark.parametrize(("form", "bytes_each"), [(INT4, 0.5), (INT8, 1), (FP8, 1)], ids=str)
def test_packed_weights_have_the_size_of_the_given_ones(form: WeightFormat, bytes_each: float) -> None:
    assert packing.pack(oracle.matrix(form, 512, 64)).packed.nbytes == bytes_each * 512 * 64


def test_scales_of_bfloat16_are_rounded() -> None:
    matrix = oracle.matrix(INT4, 128, 64)
    found = packing.unpack(packing.pack(replace(matrix, scales=matrix.scales.bfloat16())))
    assert torch.equal(found.scales, matrix.scales.bfloat16().half())


@pytest.mark.parametrize("bad", [70000.0, torch.inf, torch.nan])
def test_a_scale_that_is_not_finite_in_fp16(bad: float) -> None:
    matrix = oracle.matrix(INT4, 128, 64)
    scales = matrix.scales.float()
    scales[1, 5] = bad
    with pytest.raises(ValueError, match=rf"^a scale is {bad:g}, which torch\.float16 cannot hold, so"):
        packing.pack(replace(matrix, scales=scales))


@pytest.mark.parametrize(("dtype", "bad"), [(torch.bfloat16, 7e-7), (torch.float32, -7e-7), (torch.float32, 1e-9)])
def test_a_scale_of_which_fp16_keeps_few_bits(dtype: torch.dtype, bad: float) -> None:
    matrix = oracle.matrix(INT4, 128, 64)
    scales = matrix.scales.to(dtype) * 2**-10
    scales[1, 5] = bad
    with pytest.raises(
        ValueError, match=r"^a scale is -?[\d.]+e-\d+, of which fp16 keeps at most four bits; use a check"
    ):
        packing.pack(replace(matrix, scales=scales))


def test_a_small_scale_among_large_ones() -> None:
    matrix = oracle.matrix(INT4, 128, 64)
    scales = matrix.scales.float()
    scales[1, 5] = 1e-30
    found = packing.unpack(packing.pack(replace(matrix, scales=scales)))
    assert float(found.scales[1, 5]) == 0


@pytest.mark.parametrize("small", [0.0, 2.0**-24, 3 * 2.0**-24])
def test_small_scales_that_fp16_holds(small: float) -> None:
    """Scales of columns of zeros are powers of two in some checkpoints."""
    matrix = oracle.matrix(INT4, 128, 64)
    scales = matrix.scales.float() * 2**-10
    scales = scales.half().float()
    scales[1, 5] = small
    found = packing.unpack(packing.pack(replace(matrix, scales=scales)))
    assert float(found.scales[1, 5]) == small


@pytest.mark.parametrize("bad", [-1, 16])
def test_a_zero_point_out_of_range(bad: int) -> None:
    matrix = oracle.matrix(INT4, 128, 64)
    assert matrix.zeros is not None
    zeros = matrix.zeros.clone()
    zeros[1, 5] = bad
    with pytest.raises(
        ValueError,
        match=rf"^zero points range from .*{bad}.*, but those of int4 .* 0 and 15; use another checkpoint\.$",
    ):
        packing.pack(replace(matrix, zeros=zeros))


@pytest.mark.parametrize("bits", [0x7F, 0xFF])
def test_a_weight_that_is_nan(bits: int) -> None:
    matrix = oracle.matrix(FP8, 128, 64)
    matrix.numbers.view(torch.uint8)[100, 63] = bits
    with pytest.raises(ValueError, match=r"^a weight is NaN"):
        packing.pack(matrix)
