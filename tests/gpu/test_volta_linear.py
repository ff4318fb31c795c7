"""Products with quantised weights on a real GPU: machine code on a V100, elsewhere PTX that the driver compiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.volta import kernels as attention
from fastattention_vllm.linear.volta import kernels, launch, packing, reference
from fastattention_vllm.linear.volta.packing import PackedWeights
from fastattention_vllm.linear.weights import MIDDLE, QuantisedMatrix, WeightFormat
from tests.linear import oracle
from tests.linear.oracle import FORMATS

ALL_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 24, 25, 33, 40)
SHAPES = ((8, 8), (712, 168), (1312, 5120), (328, 8704))
"""The smallest, odd ones, and of variants with four and with seven tiles."""
INT4, FP8 = WeightFormat("int4", "group", 128, True), WeightFormat("fp8_e4m3", "block")
ONE_OF_EACH_KIND = (INT4, WeightFormat("int8", "channel"), FP8)


@pytest.fixture(scope="module", autouse=True)
def gpu() -> Iterator[None]:
    """Replaces the fixture of other GPU tests, because these run from the V100 on."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (7, 0):
        pytest.skip("needs an NVIDIA GPU of compute capability 7.0 or newer")
    torch.zeros(1, device="cuda")  # images are loaded into torch's context
    attention.choose("auto")
    for form in ONE_OF_EACH_KIND:
        kernels.load(form)
    # Otherwise cuBLAS may add parts of sums in fp16.
    whole = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    yield
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = whole


def numbers_of(rows: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).half().cuda()


def on_gpu(matrix: QuantisedMatrix) -> QuantisedMatrix:
    zeros = None if matrix.zeros is None else matrix.zeros.cuda()
    return replace(matrix, numbers=matrix.numbers.cuda(), scales=matrix.scales.cuda(), zeros=zeros)


def packed(matrix: QuantisedMatrix) -> PackedWeights:
    return packing.pack(on_gpu(matrix))


def check(matrix: QuantisedMatrix, rows: int, *, bias: bool = False, x: torch.Tensor | None = None) -> None:
    x = numbers_of(rows, matrix.k) if x is None else x
    offset = numbers_of(1, matrix.n, 1)[0] if bias else None
    weights = oracle.weights(matrix).cuda()
    if not launch.reads_packed(matrix.format.kind, rows):
        weights = weights.half().double()  # what is multiplied, also of FP8
    oracle.check(kernels.apply(x, packed(matrix), offset), x, weights, offset)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_every_variant(form: WeightFormat, shape: tuple[int, int]) -> None:
    matrix = oracle.matrix(form, *shape)
    weights, expected = packed(matrix), oracle.weights(matrix).cuda()
    for rows in ALL_ROWS:
        x, bias = numbers_of(rows, matrix.k), numbers_of(1, matrix.n, 1)[0] if rows % 2 else None
        oracle.check(kernels.apply(x, weights, bias), x, expected, bias)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8_e4m3"])
def test_these_shapes_use_every_variant(kind: str) -> None:
    variants = kernels._variants(kernels.NAMES[kind])
    assert {launch.variant_for(variants, rows, n) for rows in (0, *ALL_ROWS[:10]) for _, n in SHAPES} == set(variants)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [113, 256, 1024])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_prompts(form: WeightFormat, rows: int, bias: bool) -> None:
    check(oracle.matrix(form, 712, 1032), rows, bias=bias)


@pytest.mark.parametrize("form", ONE_OF_EACH_KIND, ids=str)
def test_many_rows_with_a_bias(form: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ROWS_WITH_BIAS", 100)
    check(oracle.matrix(form, 712, 1032), 330, bias=True)


@pytest.mark.parametrize("form", ONE_OF_EACH_KIND, ids=str)
def test_prompts_in_slices(form: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SCRATCH_BYTES", 2 * 712 * 8 * 30)
    assert launch.slice_tiles(1032, 712) == 26  # 129 tiles: four slices of 26 and one of 25
    check(oracle.matrix(form, 712, 1032), 300, bias=True)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_weights_are_unpacked(form: WeightFormat) -> None:
    """Integers bit for bit, FP8 rounded once (or twice, close to the middle between two numbers)."""
    matrix = oracle.matrix(form, 712, 168)
    out = torch.full((80, 712), torch.nan, dtype=torch.float16, device="cuda")
    kernels.unpack_tiles(packed(matrix), 7, out)
    expected = oracle.weights(matrix).cuda()[:, 56:136].t()
    tolerance = 1.001 * 2**-11 * expected.abs() + 2**-24 if form.kind == "fp8_e4m3" else 0 * expected
    assert bool(((out.double() - expected).abs() <= tolerance).all())


@pytest.mark.parametrize("rows", [1, 9, 200])
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_zero_points_at_their_limits(kind: str, rows: int) -> None:
    most = 2 * MIDDLE[kind] - 1
    form = WeightFormat(kind, "group", 32, True)  # type: ignore[arg-type]
    for number in (0, most):
        for zero in (0, most):
            usual = oracle.matrix(form, 256, 64)
            bits = torch.full_like(usual.numbers, -1 if number else 0)
            assert usual.zeros is not None
            check(replace(usual, numbers=bits, zeros=torch.full_like(usual.zeros, zero)), rows)


@pytest.mark.parametrize("rows", [2, 16, 150])
@pytest.mark.parametrize("scale", [2.0**-24, 2.0**-20, 2.0**-14, 100.0, 2000.0])
@pytest.mark.parametrize("form", ONE_OF_EACH_KIND, ids=str)
def test_extreme_scales(form: WeightFormat, scale: float, rows: int) -> None:
    """Subnormal ones in fp16, and large ones, with x so that results are within fp16's range."""
    usual = oracle.matrix(form, 512, 136)
    largest = 448 if form.kind == "fp8_e4m3" else 2 * MIDDLE[form.kind]
    scale = min(scale, 60000 / largest)
    matrix = replace(usual, scales=torch.full_like(usual.scales, scale))
    size = min(1.0, 100 / (scale * largest))
    check(matrix, rows, x=(numbers_of(rows, 512) * size).half())


@pytest.mark.parametrize("form", ONE_OF_EACH_KIND, ids=str)
def test_equal_inputs_give_equal_bits(form: WeightFormat) -> None:
    weights = packed(oracle.matrix(form, 2048, 5120))
    for rows in (1, 4, 8, 16, 40, 200):
        x = numbers_of(rows, 2048)
        first = kernels.apply(x, weights)
        assert all(torch.equal(kernels.apply(x, weights), first) for _ in range(20))
    x = numbers_of(40, 2048)
    assert torch.equal(kernels.apply(x, weights)[16:32], kernels.apply(x[16:32].clone(), weights))


@pytest.mark.parametrize("rows", [1, 5, 20, 200])
@pytest.mark.parametrize("form", ONE_OF_EACH_KIND, ids=str)
def test_a_graph_is_replayed_with_other_x(form: WeightFormat, rows: int) -> None:
    """Memory that was allocated in the meantime does not overlap the graph's."""
    matrix = oracle.matrix(form, 712, 1032)
    weights, x, bias = packed(matrix), numbers_of(rows, 712), numbers_of(1, 1032, 1)[0]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kernels.apply(x, weights, bias)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.apply(x, weights, bias)
    other = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(8)]
    for seed in (2, 3):
        x.copy_(numbers_of(rows, 712, seed))
        graph.replay()
        assert torch.equal(out, kernels.apply(x, weights, bias))
        assert bool(out.isfinite().all())
    assert all(bool(one.isnan().all()) for one in other)


def test_compiled_code_contains_one_operator() -> None:
    weights = packed(oracle.matrix(INT4, 256, 64))
    compiled = torch.compile(kernels.apply, fullgraph=True, dynamic=True)
    for rows in (3, 21, 150):
        x = numbers_of(rows, 256)
        assert torch.equal(compiled(x, weights), kernels.apply(x, weights))


@pytest.mark.parametrize("rows", [3, 200])
def test_x_with_other_strides(rows: int) -> None:
    """A slice of a wider tensor is read where it is. One that is not aligned, and a transposed one, are copied."""
    matrix = oracle.matrix(INT4, 256, 64)
    weights, wide = packed(matrix), numbers_of(rows, 1024)
    for x in (wide[:, 256:512], wide[:, 3:259], numbers_of(256, rows).t()):
        assert torch.equal(kernels.apply(x, weights), kernels.apply(x.contiguous().clone(), weights))
    assert kernels.apply(wide[:, :256].view(1, rows, 256), weights).shape == (1, rows, 64)
    assert kernels.apply(wide[:0, :256], weights).shape == (0, 64)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_packing_on_the_gpu_gives_the_same_bits(form: WeightFormat) -> None:
    matrix = oracle.matrix(form, 712, 168)
    here, there = packing.pack(matrix), packed(matrix)
    assert torch.equal(here.packed, there.packed.cpu())
    assert torch.equal(here.scales, there.scales.cpu())
    assert torch.equal(reference.dequantised(here), reference.dequantised(there).cpu())


@pytest.mark.parametrize("form", ONE_OF_EACH_KIND, ids=str)
def test_packing_needs_little_memory(form: WeightFormat) -> None:
    matrix = on_gpu(oracle.matrix(form, 5120, 8192))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weights = packing.pack(matrix)
    own = weights.packed.nbytes + weights.scales.nbytes
    extra = 12 * weights.scales.nbytes  # zero points, and scales in other dtypes
    assert torch.cuda.max_memory_allocated() - before <= own + extra + 5 * packing.SLICE_BYTES


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_drawn_problems(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(FORMATS))
    k, n = 8 * data.draw(st.integers(1, 300)), 8 * data.draw(st.integers(1, 1500))
    matrix = oracle.matrix(form, k, n, seed=data.draw(st.integers(0, 99)))
    rows = data.draw(st.integers(1, 16 * launch.MOST_TURNS[form.kind]))
    check(matrix, rows, bias=data.draw(st.booleans()))
