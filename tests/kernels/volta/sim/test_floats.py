"""fp32 and fp16 arithmetic and conversions against numpy."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy
import pytest

from tests.kernels.volta.machine import Array, compile_together, elementwise, more, run, types_of

COUNT = 384
ORDINARY = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 65504, 65520]
EDGES = [*ORDINARY, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 3e38, -3e38]


def reals(seed: int) -> Array:
    rng = numpy.random.default_rng(seed)
    values = (rng.standard_normal(COUNT) * 10.0 ** rng.integers(-6, 6, COUNT)).astype(numpy.float32)
    values[: len(EDGES)] = rng.permutation(numpy.array(EDGES, numpy.float32))
    return values


def halves(seed: int) -> Array:
    """Random bits, which include infinities, NaN and subnormal numbers."""
    return numpy.random.default_rng(seed).integers(0, 2**16, COUNT, dtype=numpy.uint16).view(numpy.float16)


def pairs(first: Array, second: Array) -> Array:
    return numpy.stack([first, second], 1).view(numpy.uint32).ravel()


def assert_same(result: Array, expected: Array) -> None:
    """Equal bit for bit, except that all NaN are equal."""
    assert result.dtype == expected.dtype
    numpy.testing.assert_array_equal(numpy.isnan(result), numpy.isnan(expected))
    seen = ~numpy.isnan(expected)
    unsigned = f"u{result.dtype.itemsize}"
    numpy.testing.assert_array_equal(result[seen].view(unsigned), expected[seen].view(unsigned))


def flushed(x: Array) -> Array:
    return numpy.where(numpy.abs(x) < numpy.finfo(numpy.float32).tiny, numpy.copysign(numpy.float32(0), x), x)


X, Y, Z = reals(1), reals(2), reals(3)
HX, HY, HZ = halves(4), halves(5), halves(6)


with numpy.errstate(all="ignore"):
    EXPRESSIONS: list[tuple[str, tuple[Array, ...], Array]] = [
        ("__fadd_rn(a, b)", (X, Y), X + Y),
        ("__fmul_rn(a, b)", (X, Y), X * Y),
        ("a < b ? a : c", (X, Y, Z), numpy.where(X < Y, X, Z)),
        ("!(a >= b) ? a : c", (X, Y, Z), numpy.where(~(X >= Y), X, Z)),
        ("a != b ? a : c", (X, Y, Z), numpy.where(X != Y, X, Z)),
        ("a != a ? c : a", (X, Y, Z), numpy.where(numpy.isnan(X), Z, X)),
        ("fminf(a, b)", (X, Y), numpy.fmin(X, Y)),
        ("-fabsf(a)", (X,), -numpy.abs(X)),
        ("__saturatef(a)", (X,), numpy.where(numpy.isnan(X), 0, numpy.clip(X + 0.0, 0, 1)).astype("float32")),
        ("a / b", (X, Y), X / Y),
        ("sqrtf(a)", (X,), numpy.sqrt(X)),
        ("1.0f / a", (X,), 1 / X),
        ("rintf(a)", (X,), numpy.rint(X)),
    ]
compile_together((text, types_of(inputs, expected.dtype)) for text, inputs, expected in EXPRESSIONS)


@pytest.mark.parametrize(("expression", "inputs", "expected"), EXPRESSIONS)
def test_an_expression(expression: str, inputs: tuple[Array, ...], expected: Array) -> None:
    result, _ = elementwise(expression, *inputs, output=numpy.float32)
    assert_same(result, expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_multiply_add_is_rounded_once() -> None:
    a, b = (numpy.random.default_rng(s).standard_normal(COUNT).astype(numpy.float32) for s in (8, 9))
    c = -(a * b)  # so that only what single rounding keeps is left
    result, done = elementwise("__fmaf_rn(a, b, c)", a, b, c, output=numpy.float32)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    assert_same(result, numpy.array([float(value) for value in exact], numpy.float32))
    assert any(opcode.startswith("FFMA") for opcode in done.opcodes)


def directed(exact: Fraction, mode: str) -> numpy.float32:
    nearest = numpy.float32(float(exact))
    error = exact - Fraction(float(nearest))
    toward_zero = mode == "rz"
    if error < 0 and (mode == "rd" or (toward_zero and nearest > 0)):
        return numpy.nextafter(nearest, numpy.float32(-numpy.inf))
    if error > 0 and (mode == "ru" or (toward_zero and nearest < 0)):
        return numpy.nextafter(nearest, numpy.float32(numpy.inf))
    return nearest


DIRECTIONS = ("rz", "ru", "rd")
compile_together(
    (text.format(mode), types)
    for mode in DIRECTIONS
    for text, types in (
        ("__fmaf_{}(a, b, c)", ("float32",) * 4),
        ("__fmul_{}(a, b)", ("float32",) * 4),
        ("__fadd_{}(a, c)", ("float32",) * 4),
        ("__uint2float_{}(a)", ("uint32", "float32")),
    )
)


@pytest.mark.parametrize("mode", DIRECTIONS)
def test_directed_rounding(mode: str) -> None:
    rng = numpy.random.default_rng(10)
    a, b, c = (rng.standard_normal(COUNT).astype(numpy.float32) for _ in range(3))
    big = rng.integers(0, 2**32, COUNT, dtype=numpy.uint32)
    for expression, exact in (
        (f"__fmaf_{mode}(a, b, c)", [(x, y, z) for x, y, z in zip(a, b, c, strict=True)]),
        (f"__fmul_{mode}(a, b)", [(x, y, 0) for x, y in zip(a, b, strict=True)]),
        (f"__fadd_{mode}(a, c)", [(x, 1, z) for x, z in zip(a, c, strict=True)]),
    ):
        result, _ = elementwise(expression, a, b, c, output=numpy.float32)
        expected = [directed(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), mode) for x, y, z in exact]
        assert_same(result, numpy.array(expected))
    result, _ = elementwise(f"__uint2float_{mode}(a)", big, output=numpy.float32)
    assert_same(result, numpy.array([directed(Fraction(int(x)), mode) for x in big]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_subnormal_numbers_are_flushed_if_the_instruction_flushes() -> None:
    tiny = numpy.finfo(numpy.float32).tiny
    a = numpy.linspace(-2 * tiny, 2 * tiny, COUNT, dtype=numpy.float32)
    b = numpy.full(COUNT, 0.75, numpy.float32)
    kept, _ = elementwise("__fmul_rn(a, b)", a, b, output=numpy.float32)
    assert_same(kept, a * b)
    code = 'asm("mul.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));'
    result, done = elementwise(code, a, b, output=numpy.float32)
    assert_same(result, flushed(flushed(a) * b))
    assert "FMUL.FTZ" in done.opcodes


SPECIAL_FUNCTIONS = [
    ("ex2.approx.ftz", numpy.exp2),
    ("lg2.approx.ftz", numpy.log2),
    ("rcp.approx.ftz", numpy.reciprocal),
    ("rsqrt.approx.ftz", lambda x: 1 / numpy.sqrt(x)),
    ("sqrt.approx.ftz", numpy.sqrt),
    ("sin.approx.ftz", numpy.sin),
    ("cos.approx.ftz", numpy.cos),
]


def special_function(instruction: str) -> str:
    return f'asm("{instruction}.f32 %0, %1;" : "=f"(d) : "f"(a));'


compile_together((special_function(instruction), ("float32",) * 2) for instruction, _ in SPECIAL_FUNCTIONS)


@pytest.mark.parametrize(("instruction", "function"), SPECIAL_FUNCTIONS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_special_functions(instruction: str, function: numpy.ufunc) -> None:
    x = numpy.random.default_rng(11).uniform(-6, 6, COUNT).astype(numpy.float32)
    x[:4] = [0, numpy.inf, -numpy.inf, numpy.nan]
    result, done = elementwise(special_function(instruction), x, output=numpy.float32)
    expected = function(x.astype(numpy.float64)).astype(numpy.float32)
    if instruction.startswith(("sin", "cos")):
        numpy.testing.assert_allclose(result[4:], expected[4:], atol=2e-6)
    else:
        numpy.testing.assert_allclose(result, expected, rtol=3e-7)
    assert any(opcode.startswith("MUFU") for opcode in done.opcodes)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fp16_to_fp32_and_back_at_every_number() -> None:
    """fp32 numbers just below, on and just above every tie between two fp16 numbers."""
    every = numpy.arange(2**16, dtype=numpy.uint16)
    widened, _ = elementwise('asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(a));', every, output=numpy.float32)
    assert_same(widened, every.view(numpy.float16).astype(numpy.float32))
    finite = numpy.sort(every.view(numpy.float16)[numpy.isfinite(every.view(numpy.float16))].astype(numpy.float32))
    ties = (finite[1:] + finite[:-1]) / 2
    below, above = (numpy.nextafter(ties, numpy.float32(limit)) for limit in (-numpy.inf, numpy.inf))
    near = numpy.concatenate([below, ties, above, X])
    near = near[~numpy.isnan(near)]
    narrowed, done = elementwise('asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(a));', near, output=numpy.uint16)
    assert_same(narrowed.view(numpy.float16), near.astype(numpy.float16))
    assert "F2F.F16.F32" in done.opcodes


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("add.rn.f16x2 %0, %1, %2;", lambda a, b, c: a + b),
        more("sub.rn.f16x2 %0, %1, %2;", lambda a, b, c: a - b),
        more("mul.rn.f16x2 %0, %1, %2;", lambda a, b, c: a * b),
        ("fma.rn.f16x2 %0, %1, %2, %3;", lambda a, b, c: (a.astype("f8") * b + c).astype("f2")),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_pairs_of_fp16(instruction: str, expected: numpy.ufunc) -> None:
    a, b, c = pairs(HX, HY), pairs(HY, HZ), pairs(HZ, HX)
    code = f'asm("{instruction}" : "=r"(d) : "r"(a), "r"(b), "r"(c));'
    result, done = elementwise(code, a, b, c, output=numpy.uint32)
    want = expected(*(array.view(numpy.float16) for array in (a, b, c)))
    assert_same(result.view(numpy.float16), want)
    assert any(opcode.startswith(("HADD2", "HMUL2", "HFMA2")) for opcode in done.opcodes)


def test_a_multiply_add_of_fp16_is_rounded_once() -> None:
    """Sums so close to a tie that rounding to fp32 first would put them on it."""
    rng = numpy.random.default_rng(12)
    a, b = (rng.uniform(1, 2, 4096).astype(numpy.float16) for _ in range(2))
    c = (rng.choice([-1, 1], 4096) * 2.0 ** rng.integers(-24, 15, 4096)).astype(numpy.float16)
    code = 'asm("fma.rn.f16 %0, %1, %2, %3;" : "=h"(d) : "h"(a), "h"(b), "h"(c));'
    result, _ = elementwise(code, *(array.view(numpy.uint16) for array in (a, b, c)), output=numpy.uint16)
    exact = a.astype(numpy.float64) * b.astype(numpy.float64) + c.astype(numpy.float64)
    assert_same(result.view(numpy.float16), exact.astype(numpy.float16))


CONSTANT_HALVES = """extern "C" __global__ void constants(const unsigned* a, unsigned* out, unsigned b) {
  const int i = threadIdx.x;
  unsigned d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a[i]), "r"(b));
  out[i] = d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a[i]), "r"(b));
  out[i + 32] = d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a[i]), "r"(0x2c002c00), "r"(0xd480d480));
  out[i + 64] = d;
}"""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_constants_as_operands_of_fp16() -> None:
    """nvdisasm writes them with a space: `c[0x0] [0x170]`. With .F32 they are fp32 numbers, used for both halves."""
    a, b = HX[:64].copy(), numpy.array([1.25, 2.0], numpy.float16)
    a[~numpy.isfinite(a)] = 3
    out = numpy.zeros(3 * 32, numpy.uint32)
    done = run(CONSTANT_HALVES, a.view(numpy.uint32), out, b.view(numpy.uint32)[0])
    texts = [facts.text for facts in done.simulation.instructions]
    assert any("HADD2" in text and text.endswith("c[0x0] [0x170]") for text in texts)
    assert any("HMUL2" in text and text.endswith("c[0x0] [0x170]") for text in texts)
    assert any("HADD2" in text and text.endswith("c[0x2] [0x0].F32") for text in texts)
    added, multiplied, both = out.view(numpy.float16).reshape(3, 64)
    assert_same(added, a + numpy.tile(b, 32))
    assert_same(multiplied, a * numpy.tile(b, 32))
    assert_same(both, (a.astype(numpy.float64) / 16 - 72).astype(numpy.float16))


@pytest.mark.parametrize("compared", ["lt", more("geu"), more("neu")])
def test_comparisons_of_fp16(compared: str) -> None:
    code = f"""asm("{{.reg .pred p; setp.{compared}.f16 p, %1, %2; selp.u32 %0, 1, 0, p;}}"
               : "=r"(d) : "h"(a), "h"(b));"""
    b = HY.copy()
    b[::4] = HX[::4]
    result, done = elementwise(code, HX.view("u2"), b.view("u2"), output=numpy.uint32)
    less = numpy.less(HX, b)
    expected = {"lt": less, "geu": ~less, "neu": numpy.not_equal(HX, b)}[compared]
    numpy.testing.assert_array_equal(result, expected.astype(numpy.uint32))
    assert any(opcode.startswith("HSETP2") for opcode in done.opcodes)


ROUNDINGS = {"rni": numpy.rint, "rzi": numpy.trunc, "rmi": numpy.floor, "rpi": numpy.ceil}
INTEGERS = ("uint32", "int32", "uint64", "int64")


def to_integer(mode: str, kind: str) -> str:
    constraint = "r" if "32" in kind else "l"
    return f'asm("cvt.{mode}.{kind[0].replace("i", "s")}{kind[-2:]}.f32 %0, %1;" : "={constraint}"(d) : "f"(a));'


compile_together((to_integer(mode, kind), ("float32", kind)) for mode in ROUNDINGS for kind in INTEGERS)


@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("kind", INTEGERS)
def test_floats_to_integers(mode: str, kind: str) -> None:
    x = numpy.concatenate([X, numpy.array([2.0**31, 2.0**32, 2.0**63, 2.0**64, -(2.0**31), -(2.0**63)], numpy.float32)])
    result, _ = elementwise(to_integer(mode, kind), x, output=kind)
    limits = numpy.iinfo(kind)
    for value, found in zip(x, result, strict=True):
        if math.isnan(value):
            expected = 0 if "32" in kind else 2**63 * (1 if kind == "uint64" else -1)
        elif math.isinf(value):
            expected = limits.max if value > 0 else limits.min
        else:
            expected = min(max(int(ROUNDINGS[mode](value)), limits.min), limits.max)
        assert int(found) == expected, value


NANS = numpy.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFC00000, 0xFFFFFFFF, 0x7FA00000], numpy.uint32)
NAN_HALVES = numpy.array([0x7C01, 0x7E00, 0x7FFF, 0xFE00, 0xFFFF, 0x7D00], numpy.uint16)
NAN, NAN_HALF = 0x7FFFFFFF, 0x7FFF
OF_NAN: list[tuple[str, tuple[Array, ...], str, int]] = [
    ("__fadd_rn(a, 1.0f)", (NANS.view("f4"),), "float32", NAN),
    ("__fmul_rn(a, -2.0f)", (NANS.view("f4"),), "float32", NAN),
    ("__fmaf_rn(a, 2.0f, 1.0f)", (NANS.view("f4"),), "float32", NAN),
    ("fmaxf(a, b)", (NANS.view("f4"), NANS[::-1].copy().view("f4")), "float32", NAN),
    ("fminf(a, -b)", (NANS.view("f4"), NANS[::-1].copy().view("f4")), "float32", NAN),
    ("rintf(a)", (NANS.view("f4"),), "float32", NAN),
    *((special_function(name), (NANS.view("f4"),), "float32", NAN) for name, _ in SPECIAL_FUNCTIONS),
    ('asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(a));', (NAN_HALVES,), "float32", NAN),
    ('asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(a));', (NANS.view("f4"),), "uint16", NAN_HALF),
    ('asm("add.rn.f16 %0, %1, %1;" : "=h"(d) : "h"(a));', (NAN_HALVES,), "uint16", NAN_HALF),
    ('asm("mul.rn.f16 %0, %1, %1;" : "=h"(d) : "h"(a));', (NAN_HALVES,), "uint16", NAN_HALF),
    ('asm("fma.rn.f16 %0, %1, %1, %1;" : "=h"(d) : "h"(a));', (NAN_HALVES,), "uint16", NAN_HALF),
]
INVALID = numpy.array([math.inf, -math.inf], numpy.float32)
OF_NAN += [
    ("__fadd_rn(a, -a)", (INVALID,), "float32", NAN),
    ("__fmul_rn(a, 0.0f)", (INVALID,), "float32", NAN),
    (special_function("sqrt.approx.ftz"), (INVALID[1:],), "float32", NAN),
]
compile_together((text, types_of(inputs, kind)) for text, inputs, kind, _ in OF_NAN)


@pytest.mark.parametrize(("expression", "inputs", "kind", "expected"), OF_NAN)
def test_arithmetic_has_one_nan(expression: str, inputs: tuple[Array, ...], kind: str, expected: int) -> None:
    """PTX ISA: a NaN that arithmetic produces has these bits, whatever NaN went in."""
    result, _ = elementwise(expression, *inputs, output=kind)
    bits = result.view(f"u{result.dtype.itemsize}")
    assert (bits == expected).all(), [hex(one) for one in bits]
