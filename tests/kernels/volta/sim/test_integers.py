"""Integer instructions against numpy."""

from __future__ import annotations

import numpy
import pytest

from tests.kernels.volta.machine import Array, compile_together, elementwise, more, types_of

COUNT = 384
EDGES = [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 0x00FF00FF]


def words(seed: int, kind: str = "uint32") -> Array:
    rng = numpy.random.default_rng(seed)
    random = rng.integers(0, 2**32, COUNT, dtype=numpy.uint32)
    random[: len(EDGES)] = rng.permutation(numpy.array(EDGES, numpy.uint32))
    return random.view(kind)


def wide(seed: int, kind: str = "uint64") -> Array:
    return numpy.random.default_rng(seed).integers(0, 2**64, COUNT, dtype=numpy.uint64).view(kind)


A, B, C = words(1), words(2), words(3)
SA, SB, SC = words(1, "int32"), words(2, "int32"), words(3, "int32")
LA, LB = wide(4), wide(5)
SMALL = numpy.arange(COUNT, dtype=numpy.uint32) % 33


EXPRESSIONS: list[tuple[str, tuple[Array, ...], Array]] = [
    ("a + b - c", (A, B, C), A + B - C),
    ("a * b + c", (A, B, C), A * B + C),
    ("a - b", (LA, LB), LA - LB),
    ("a + (b << 3)", (LA, LB), LA + (LB << numpy.uint64(3))),
    ("a * b", (LA, LB), LA * LB),
    ("a & b ^ ~c", (A, B, C), A & B ^ ~C),
    ("(a & b) | (b & c) | (a & c)", (A, B, C), A & B | B & C | A & C),
    ("a << (b & 31)", (A, SMALL), A << (SMALL & 31)),
    ("a >> (b & 31)", (A, SMALL), A >> (SMALL & 31)),
    ("a >> (b & 31)", (SA, SMALL), SA >> (SMALL & 31).astype(numpy.int32)),
    ("a >> b", (LA, SMALL), LA >> SMALL.astype(numpy.uint64)),
    ("a << b", (LA, SMALL), LA << SMALL.astype(numpy.uint64)),
    ("(long long)a >> b", (LA, SMALL), (LA.view("int64") >> SMALL).view("uint64")),
    ("min(a, b)", (A, B), numpy.minimum(A, B)),
    ("max(a, b)", (SA, SB), numpy.maximum(SA, SB)),
    ("a < 0 ? -a : a", (SA,), numpy.where(SA < 0, -SA, SA)),
    ("__popc(a)", (A,), numpy.bitwise_count(A).astype(numpy.uint32)),
    ("__clz(a)", (A,), numpy.array([32 - int(x).bit_length() for x in A], numpy.uint32)),
    ("__ffs(a)", (A,), numpy.array([(int(x) & -int(x)).bit_length() for x in A], numpy.uint32)),
    ("__brev(a)", (A,), numpy.array([int(f"{x:032b}"[::-1], 2) for x in A], numpy.uint32)),
    ("__umulhi(a, b)", (A, B), (A.astype("uint64") * B >> numpy.uint64(32)).astype("uint32")),
    ("__mulhi(a, b)", (SA, SB), (SA.astype("int64") * SB >> 32).astype("int32")),
    ("a < b ? c : a", (SA, SB, SC), numpy.where(SA < SB, SC, SA)),
    ("a <= b ? c : a", (A, B, C), numpy.where(A <= B, C, A)),
    ("a != b && b > c ? 1u : 2u", (A, B, C), numpy.where((A != B) & (B > C), 1, 2).astype("uint32")),
    ("a == b || b >= c ? 1u : 2u", (A, B, C), numpy.where((A == B) | (B >= C), 1, 2).astype("uint32")),
]
compile_together((text, types_of(inputs, expected.dtype)) for text, inputs, expected in EXPRESSIONS)


@pytest.mark.parametrize(("expression", "inputs", "expected"), EXPRESSIONS)
def test_an_expression(expression: str, inputs: tuple[Array, ...], expected: Array) -> None:
    result, _ = elementwise(expression, *inputs, output=expected.dtype)
    numpy.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("compared", "operator"), [("lt", numpy.less), more("ge", numpy.greater_equal), more("ne", numpy.not_equal)]
)
@pytest.mark.parametrize("kind", ["uint64", "int64"])
def test_comparisons_of_64_bits(compared: str, operator: numpy.ufunc, kind: str) -> None:
    """Two comparisons of 32 bits; often only the upper or only the lower words differ."""
    a, b = LA.copy(), LB.copy()
    b[::3] = a[::3]
    b[1::3] = (a[1::3] & ~numpy.uint64(0xFFFFFFFF)) | (b[1::3] & numpy.uint64(0xFFFFFFFF))
    a, b = a.view(kind), b.view(kind)
    letter = "us"[kind == "int64"]
    code = f"""asm("{{.reg .pred p; setp.{compared}.{letter}64 p, %1, %2; selp.u32 %0, 1, 0, p;}}"
               : "=r"(d) : "l"(a), "l"(b));"""
    result, _ = elementwise(code, a, b, output=numpy.uint32)
    numpy.testing.assert_array_equal(result, operator(a, b).astype(numpy.uint32))


INTEGERS = ("uint32", "int32", "uint64", "int64")
compile_together((f"a {operator} b", (kind,) * 3) for kind in INTEGERS for operator in "/%")


@pytest.mark.parametrize("kind", INTEGERS)
def test_division(kind: str) -> None:
    """Division by a number unknown to the compiler: reciprocals, conversions with directed rounding, corrections."""
    a = (wide(6) if "64" in kind else words(6)).view(kind)
    b = (wide(7) if "64" in kind else words(7)).view(kind) >> numpy.array(numpy.arange(COUNT) % 28, kind)
    b[b == 0] = 3
    quotient, _ = elementwise("a / b", a, b, output=kind)
    remainder, _ = elementwise("a % b", a, b, output=kind)
    exact = [int(abs(int(x)) // abs(int(y))) * (1 if (x < 0) == (y < 0) else -1) for x, y in zip(a, b, strict=True)]
    wrapped = numpy.array([q & (2**64 - 1) for q in exact], numpy.uint64).astype(kind)
    numpy.testing.assert_array_equal(quotient, wrapped)
    numpy.testing.assert_array_equal(remainder, a - wrapped * b)


TABLES = {
    table: f'asm("lop3.b32 %0, %1, %2, %3, {table};" : "=r"(d) : "r"(a), "r"(b), "r"(c));'
    for table in (0x80, 0xFE, 0x96, 0xE8, 0x1B, 0xD8, 0x01, 0x7F)
}
SELECTORS = (0x5410, 0x7632, 0x0123, 0x4444, 0xF8A9, 0x3BC5)
compile_together((code, ("uint32",) * 4) for code in TABLES.values())
compile_together((f"__byte_perm(a, b, {selector})", ("uint32",) * 3) for selector in SELECTORS)


@pytest.mark.parametrize(("table", "code"), TABLES.items())
def test_any_function_of_three_bits(table: int, code: str) -> None:
    result, done = elementwise(code, A, B, C, output=numpy.uint32)
    expected = numpy.zeros(COUNT, numpy.uint32)
    for row in range(8):
        if table >> row & 1:
            expected |= (A if row & 4 else ~A) & (B if row & 2 else ~B) & (C if row & 1 else ~C)
    numpy.testing.assert_array_equal(result, expected)
    assert "LOP3.LUT" in done.opcodes


@pytest.mark.parametrize("selector", SELECTORS)
def test_bytes_are_permuted(selector: int) -> None:
    result, done = elementwise(f"__byte_perm(a, b, {selector})", A, B, output=numpy.uint32)
    both = [int(x).to_bytes(4, "little") + int(y).to_bytes(4, "little") for x, y in zip(A, B, strict=True)]
    expected = []
    for eight in both:
        picked = [eight[selector >> 4 * i & 7] for i in range(4)]
        # __byte_perm has no sign-spreading mode. The instruction has one in bit 3, which the compiler clears.
        expected.append(int.from_bytes(bytes(picked), "little"))
    numpy.testing.assert_array_equal(result, numpy.array(expected, numpy.uint32))
    assert "PRMT" in done.opcodes


def test_the_sign_of_a_byte_is_spread() -> None:
    code = 'asm("prmt.b32 %0, %1, %2, 0x80fb;" : "=r"(d) : "r"(a), "r"(b));'
    result, _ = elementwise(code, A, B, output=numpy.uint32)
    eight = numpy.stack([A, B], 1).view(numpy.int8).reshape(COUNT, 8)
    sign = numpy.where(eight < 0, 255, 0).astype(numpy.uint32)
    first = eight[:, 0].astype(numpy.uint8).astype(numpy.uint32)
    expected = sign[:, 3] | sign[:, 7] << 8 | first << 16 | sign[:, 0] << 24
    numpy.testing.assert_array_equal(result, expected)


def test_carries_pass_through_96_bits() -> None:
    code = """asm("{.reg .u32 t; add.cc.u32 t, %1, %2; addc.cc.u32 t, %3, %1; addc.u32 %0, %2, %3;}"
              : "=r"(d) : "r"(a), "r"(b), "r"(c));"""
    a, b, c = A.copy(), B.copy(), C.copy()
    c[::2] = ~a[::2]  # so that a carry alone decides the next one
    result, _ = elementwise(code, a, b, c, output=numpy.uint32)
    exact = [
        (int(x) + int(y) + (int(z) + int(x) << 32) + (int(y) + int(z) << 64)) >> 64 & 0xFFFFFFFF
        for x, y, z in zip(a, b, c, strict=True)
    ]
    numpy.testing.assert_array_equal(result, numpy.array(exact, numpy.uint32))


@pytest.mark.parametrize("mode", [more("wrap"), "clamp"])
def test_funnel_shifts(mode: str) -> None:
    amount = SMALL + (64 if mode == "wrap" else 0)
    both = B.astype(numpy.uint64) << numpy.uint64(32) | A
    shift = (amount & 31 if mode == "wrap" else numpy.minimum(amount, 32)).astype(numpy.uint64)
    for side, expected in (("r", both >> shift), ("l", (both << shift) >> numpy.uint64(32))):
        code = f'asm("shf.{side}.{mode}.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));'
        result, _ = elementwise(code, A, B, amount, output=numpy.uint32)
        numpy.testing.assert_array_equal(result, expected.astype(numpy.uint32))
