"""The tensor core: mma.m8n8k4 with its fragments laid out as PTX documents."""

from __future__ import annotations

import numpy
import pytest

from tests.kernels.volta.machine import Array, more, run

QUADPAIRS = 4
MEMBERS = [[4 * q + i for i in range(4)] + [16 + 4 * q + i for i in range(4)] for q in range(QUADPAIRS)]
"""The lanes of each quadpair, in the order in which PTX assigns rows or columns to them."""


def kernel(layout_a: str, layout_b: str, sums: str) -> str:
    registers, constraint, kind = (8, "f", "float") if sums == "f32" else (4, "r", "unsigned")
    d = ", ".join(f"%{i}" for i in range(registers))
    c = ", ".join(f"%{i + registers + 4}" for i in range(registers))
    a0, a1, b0, b1 = (f"%{i + registers}" for i in range(4))
    outputs = ", ".join(f'"={constraint}"(d[{i}])' for i in range(registers))
    inputs = ", ".join(f'"{constraint}"(c[{i}])' for i in range(registers))
    return f"""extern "C" __global__ void product(const uint2* a, const uint2* b, const {kind}* c_in, {kind}* d_out) {{
      {kind} c[{registers}], d[{registers}];
      for (int i = 0; i < {registers}; ++i) c[i] = c_in[threadIdx.x * {registers} + i];
      uint2 x = a[threadIdx.x], y = b[threadIdx.x];
      asm volatile("mma.sync.aligned.m8n8k4.{layout_a}.{layout_b}.{sums}.f16.f16.{sums} "
                   "{{{d}}}, {{{a0}, {a1}}}, {{{b0}, {b1}}}, {{{c}}};"
                   : {outputs} : "r"(x.x), "r"(x.y), "r"(y.x), "r"(y.y), {inputs});
      for (int i = 0; i < {registers}; ++i) d_out[threadIdx.x * {registers} + i] = d[i];
    }}"""


def fragments(matrices: Array, along_inner: bool) -> Array:
    """Fragments of matrices [quadpair, 8, 4], inner dimension last: the values held by each lane, [32, 4]."""
    held = numpy.zeros((32, 4), numpy.float16)
    for q, lanes in enumerate(MEMBERS):
        for position, lane in enumerate(lanes):
            if along_inner:
                held[lane] = matrices[q, position]
            else:
                held[lane] = matrices[q, 4 * (position // 4) : 4 * (position // 4) + 4, position % 4]
    return held


def element(lane: int, i: int, sums: str) -> tuple[int, int, int]:
    """Quadpair, row and column of element i of C and D in a lane."""
    quadpair, upper = lane >> 2 & 3, lane >> 4
    if sums == "f16":
        return quadpair, (lane & 3) + 4 * upper, i
    return quadpair, (lane & 1) + (i & 2) + 4 * upper, (i & 4) + (lane & 2) + (i & 1)


@pytest.mark.parametrize("sums", ["f32", more("f16")])
@pytest.mark.parametrize("layout_b", ["col", "row"])
@pytest.mark.parametrize("layout_a", ["row", more("col")])
def test_a_product_of_8_by_8_by_4_in_each_quadpair(layout_a: str, layout_b: str, sums: str) -> None:
    rng = numpy.random.default_rng(0)
    a, b = (rng.standard_normal((QUADPAIRS, 8, 4)).astype(numpy.float16) for _ in range(2))
    kind = numpy.dtype(f"f{int(sums[1:]) // 8}")
    c = rng.standard_normal((QUADPAIRS, 8, 8)).astype(kind)
    held_c = numpy.array([[c[element(lane, i, sums)] for i in range(8)] for lane in range(32)], kind)
    held_d = numpy.zeros_like(held_c)
    done = run(
        kernel(layout_a, layout_b, sums),
        fragments(a, layout_a == "row"),
        fragments(b, layout_b == "col"),
        held_c,
        held_d,
    )
    exact = c.astype(numpy.float64) + a.astype(numpy.float64) @ b.astype(numpy.float64).transpose(0, 2, 1)
    expected = numpy.array([[exact[element(lane, i, sums)] for i in range(8)] for lane in range(32)]).astype(kind)
    numpy.testing.assert_array_equal(held_d, expected)
    steps = 4 if sums == "f32" else 2
    assert sum(opcode.startswith("HMMA.884") for opcode in done.opcodes) == steps


@pytest.mark.parametrize(("sums", "expected"), [("f32", 0x7FFFFFFF), more("f16", 0x7FFF)])
def test_a_product_with_nan_is_the_gpus_nan(sums: str, expected: int) -> None:
    kind = numpy.dtype(f"f{int(sums[1:]) // 8}")
    of_nan = numpy.full((32, 4), numpy.array(0xFE01, numpy.uint16).view(numpy.float16))
    held_c, held_d = numpy.zeros((32, 8), kind), numpy.zeros((32, 8), kind)
    run(kernel("row", "col", sums), of_nan, numpy.ones((32, 4), numpy.float16), held_c, held_d)
    assert (held_d.view(f"u{kind.itemsize}") == expected).all()
