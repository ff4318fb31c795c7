"""The launcher of the products with quantised weights, on the emulator, against float64; and the operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastattention_vllm import cuda_driver
from fastattention_vllm.attention.volta import images
from fastattention_vllm.attention.volta import kernels as attention
from fastattention_vllm.linear.volta import kernels, launch, packing, reference
from fastattention_vllm.linear.volta.packing import PackedWeights
from fastattention_vllm.linear.weights import QuantisedMatrix, WeightFormat
from kernels.volta import linear_variants
from kernels.volta import manifest as build_manifest
from tests.linear import oracle
from tests.linear.oracle import FORMATS
from tests.linear.volta import emulated_gpu

INT4 = WeightFormat("int4", "group", 128, True)
ONE_OF_EACH_KIND = (INT4, WeightFormat("int8", "channel"), WeightFormat("fp8_e4m3", "block"))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    return emulated_gpu.use(monkeypatch)


def numbers_of(rows: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).half()


def check(matrix: QuantisedMatrix, rows: int, bias: bool) -> None:
    x, offset = numbers_of(rows, matrix.k), numbers_of(1, matrix.n, 1)[0] if bias else None
    weights = oracle.weights(matrix)
    if not launch.reads_packed(matrix.format.kind, rows):
        weights = weights.half().double()  # what is multiplied, also of FP8
    oracle.check(emulated_gpu.apply(x, packing.pack(matrix), offset), x, weights, offset)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_drawn_problems(form: WeightFormat, launches: list[tuple[str, int]], data: st.DataObject) -> None:
    """Up to 40 rows: several launches, the last of them with few rows."""
    k, n = 8 * data.draw(st.integers(1, 60)), 8 * data.draw(st.integers(1, 40))
    check(oracle.matrix(form, k, n), data.draw(st.integers(1, 40)), data.draw(st.booleans()))


@pytest.mark.parametrize("form", ONE_OF_EACH_KIND, ids=str)
def test_many_rows_are_multiplied_by_unpacked_weights(
    form: WeightFormat, launches: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slices of columns, with and without a bias, with which rows are divided, too."""
    monkeypatch.setattr(kernels, "ROWS_WITH_BIAS", 50)
    monkeypatch.setattr(launch, "SCRATCH_BYTES", 2 * 8 * 328 * 10)
    most = launch.MOST_ROWS * launch.MOST_TURNS[form.kind]
    for bias in (False, True):
        check(oracle.matrix(form, 328, 168), most + 1, bias)
    name = f"unpack_{kernels.NAMES[form.kind]}.sm_70"
    assert launches == [(name, 56)] * 6  # 21 tiles, in slices of 7
    launches.clear()
    check(oracle.matrix(form, 328, 168), most, False)
    assert [rows for _, rows in launches] == [16] * launch.MOST_TURNS[form.kind]


@pytest.mark.parametrize("allowed", [True, False])
def test_cublas_sums_parts_of_k_in_fp32(
    allowed: bool, launches: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And other products of this process stay as they are."""
    matmul, multiply, found = torch.backends.cuda.matmul, torch.mm, []

    def mm(*arguments: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        found.append(matmul.allow_fp16_reduced_precision_reduction)
        return multiply(*arguments, **named)

    monkeypatch.setattr(torch, "mm", mm)
    before = matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = allowed
    try:
        check(oracle.matrix(INT4, 256, 64), 113, False)
        assert matmul.allow_fp16_reduced_precision_reduction == allowed
    finally:
        matmul.allow_fp16_reduced_precision_reduction = before
    assert found == [False]


def test_the_last_turn_takes_the_kernel_for_fewer_rows(launches: list[tuple[str, int]]) -> None:
    check(oracle.matrix(INT4, 264, 80), 37, True)
    names = [f"linear_int4_rows{rows}_tiles4.sm_70" for rows in (16, 16, 8)]
    assert launches == list(zip(names, (16, 16, 5), strict=True))


def test_x_that_the_kernels_cannot_read_is_copied(launches: list[tuple[str, int]]) -> None:
    weights, wide = packing.pack(oracle.matrix(INT4, 256, 64)), numbers_of(3, 1024)
    for x in (wide[:, 256:512], wide[:, 3:259], numbers_of(256, 3).t(), numbers_of(3, 260)[:, :256]):
        expected = emulated_gpu.apply(x.contiguous().clone(), weights)
        assert torch.equal(emulated_gpu.apply(x, weights), expected)
    assert emulated_gpu.apply(wide[:0, :256], weights).shape == (0, 64)


@pytest.mark.parametrize("form", ONE_OF_EACH_KIND, ids=str)
def test_a_slice_of_unpacked_weights(form: WeightFormat, launches: list[tuple[str, int]]) -> None:
    matrix = oracle.matrix(form, 200, 136)
    out = torch.full((24, 200), torch.nan, dtype=torch.float16)
    kernels.unpack_tiles(packing.pack(matrix), 14, out)
    torch.testing.assert_close(out, oracle.weights(matrix)[:, 112:].t().half(), rtol=2**-10, atol=0)


# --- the operator -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_reference_computes_the_same(form: WeightFormat) -> None:
    matrix, x, bias = oracle.matrix(form, 264, 136), numbers_of(5, 264), numbers_of(1, 136, 1)[0]
    weights = packing.pack(matrix)
    assert torch.equal(reference.dequantised(weights), oracle.weights(matrix).float())
    oracle.check(kernels.apply(x, weights, bias), x, oracle.weights(matrix), bias)
    assert kernels.apply(x.view(1, 5, 264), weights).shape == (1, 5, 136)


def test_compiled_code_contains_one_operator() -> None:
    weights = packing.pack(oracle.matrix(INT4, 128, 64))
    found: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        found.append(graph)
        return graph

    compiled = torch.compile(kernels.apply, backend=keep, fullgraph=True, dynamic=True)
    for rows in (3, 21):
        x = numbers_of(rows, 128)
        assert torch.equal(compiled(x, weights), kernels.apply(x, weights))
    (graph,) = found
    assert [str(node.target) for node in graph.graph.nodes].count("fastattention.volta_linear") == 1


WEIGHTS = packing.pack(oracle.matrix(INT4, 128, 64))
ELSEWHERE = replace(WEIGHTS, scales=WEIGHTS.scales.to("meta"))
X = torch.zeros(2, 128, dtype=torch.float16)


@pytest.mark.parametrize(
    ("x", "weights", "bias", "said"),
    [
        (
            X,
            replace(WEIGHTS, scales=WEIGHTS.scales.half()),
            None,
            r"^scales has dtype torch\.float16, but .* torch\.int32",
        ),
        (X.bfloat16(), WEIGHTS, None, r"^x has dtype torch\.bfloat16, but .* need float16; pass --dtype float16\.$"),
        (X[:, :120], WEIGHTS, None, r"^x has 120 columns, but the weights have k = 128\.$"),
        (X, WEIGHTS, X[0], r"^bias has shape \[128\] and dtype torch\.float16, but must have \[64\] and float16\.$"),
        (X, WEIGHTS, X[0, :64].float(), r"^bias has shape \[64\] and dtype torch\.float32, but must have \[64\]"),
        (X, ELSEWHERE, None, r"^scales is on meta, but the weights are on cpu\.$"),
    ],
)
def test_wrong_arguments(x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None, said: str) -> None:
    for run in (emulated_gpu.apply, lambda x, weights, bias: kernels._on_cpu(x, bias, *kernels._arguments(weights))):
        with pytest.raises(ValueError, match=said):
            run(x, weights, bias)


@pytest.mark.parametrize(
    ("form", "k", "n", "said"),
    [
        (INT4, 132, 64, r"^k is 132, but the Volta kernels need a positive multiple of 8\.$"),
        (INT4, 128, 0, r"^n is 0, but"),
        (WeightFormat("int4", "group", 16), 128, 64, r"^group_size is 16, but the Volta kernels support 32, 64, 128,"),
        (WeightFormat("int8", "group", 96), 128, 64, r"^group_size is 96, but the Volta kernels support 16, 32, 64,"),
    ],
)
def test_what_is_not_supported(form: WeightFormat, k: int, n: int, said: str) -> None:
    reason = kernels.supports(form, k, n)
    with pytest.raises(ValueError, match=said):
        raise ValueError(reason)


@pytest.mark.parametrize("form", [*FORMATS, WeightFormat("int4", "group", 200)], ids=str)
def test_what_is_supported(form: WeightFormat) -> None:
    """A group as long as k, or longer, may have any length."""
    assert kernels.supports(form, 200, 136) is None


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with false images of all kernels."""
    variants = linear_variants.ALL
    for variant in variants:
        for suffix in ("cubin", "ptx"):
            (tmp_path / variant.image(suffix)).write_text(variant.image(suffix))
    build_manifest.write(tmp_path, variants, "NVRTC 12.9")
    monkeypatch.setattr(images, "IMAGES", tmp_path)
    kernels._loaded.cache_clear()
    yield tmp_path
    kernels._loaded.cache_clear()


@pytest.mark.parametrize(("capability", "suffix"), [((7, 0), "cubin"), ((7, 5), "cubin"), ((9, 0), "ptx")])
def test_all_kernels_of_a_format_are_loaded(
    capability: tuple[int, int], suffix: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[bytes, str, int]] = []
    monkeypatch.setattr(cuda_driver, "load", lambda *image: given.append(image))
    monkeypatch.setattr(kernels, "target", lambda: attention.target_of(capability))
    kernels.load(INT4)
    own = [one for one in linear_variants.ALL if one.weight == "int4"]
    assert given == [(f"{one.image(suffix)}\0".encode(), one.kernel, one.shared_bytes) for one in own]
    kernels.load(replace(INT4, group_size=32))
    assert len(given) == len(own)


def test_kernels_of_other_code_are_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(launch.CONSTANTS, "unit_bytes", 256)
    with pytest.raises(images.ImageError, match=r"another version of this package \(difference: unit_bytes\); run"):
        kernels.load(INT4)
