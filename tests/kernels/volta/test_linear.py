"""Products with quantised weights against float64: sources on the emulator, machine code on the simulated V100."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.volta import linear_problems as linear
from kernels.volta.linear_problems import Array, Problem
from kernels.volta.linear_variants import ROWS, TILE, VARIANTS, WEIGHTS, LinearVariant

PER_PROCESS = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def check(found: Array, of: Problem, columns: slice = slice(None)) -> None:
    """fp16 rounds the result once. Sums are fp32: each product adds at most a rounding error of its size."""
    expected = of.result(columns)
    sizes = numpy.abs(of.x.astype(numpy.float64)) @ numpy.abs(of.weights(columns))
    if of.factor is not None:
        sizes *= numpy.abs(of.factor[columns])
    tolerance = 2**-11 * numpy.abs(expected) + 2**-24 + 2**-20 * sizes
    assert (numpy.abs(found - expected) <= tolerance).all()


def run(of: Problem, tiles: int, ctas: int, warps: int = 0) -> Array:
    variant = linear.variant_of(of, tiles)
    launch = linear.launch(of, variant, linear.emulated(variant), ctas, warps)
    for cta in range(launch.ctas):
        launch.machine.execute(cta)
    return launch.out


@pytest.mark.parametrize("tiles", [pytest.param(4, marks=pytest.mark.more), 7])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("weight", WEIGHTS)
@PER_PROCESS
@given(data=st.data())
def test_drawn_problems(weight: str, rows: int, tiles: int, data: st.DataObject) -> None:
    quarter = 32 if weight == "int4" else 16
    count = data.draw(st.integers(rows // 2 + 1 if rows > 8 else 1, rows))
    k = 8 * data.draw(st.integers(1, 100))
    ctas = data.draw(st.integers(1, 3))
    columns = TILE * data.draw(st.integers(ctas, ctas * tiles))
    group = data.draw(st.sampled_from([0, *(quarter << shift for shift in range(5))]))
    drawn = linear.problem(
        weight,
        count,
        k,
        columns,
        group=group,
        blocks=data.draw(st.booleans()),
        factor=data.draw(st.booleans()),
        bias=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
    )
    most = next(one.warps for one in VARIANTS if (one.weight, one.rows, one.tiles) == (weight, rows, tiles))
    check(run(drawn, tiles, ctas, data.draw(st.integers(1, most))), drawn)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_nan_and_infinity_reach_their_row_and_no_other(weight: str, rows: int) -> None:
    of = linear.problem(weight, rows, 264, 40, group=128)
    of.x[1, 200] = numpy.nan
    of.x[2, 7] = numpy.inf
    found = run(of, 4, 2)
    assert numpy.isnan(found[1]).all()
    assert not numpy.isfinite(found[2]).any()
    others = [0, *range(3, rows)]
    expected = of.x[others].astype(float) @ of.weights()
    assert (numpy.abs(found[others] - expected) < 2**-8 * numpy.abs(expected).max()).all()


@pytest.mark.parametrize("weight", ["int4", "int8"])
def test_every_number_with_every_zero_point(weight: str) -> None:
    """Each row selects a single k: the results are the weights themselves. All places in a word are selected."""
    most = 16 if weight == "int4" else 256
    whole = linear.problem(weight, 8, 128, most, group=16 if weight == "int8" else 32)
    x = numpy.zeros_like(whole.x)
    x[range(8), range(72, 80)] = 1
    for number in range(0, most, 1 if weight == "int4" else 17):
        stored = numpy.full_like(whole.stored, number)
        zero = numpy.tile(numpy.arange(most, dtype=numpy.uint8), (len(whole.zero), 1))
        one = Problem(weight, x, stored, whole.scale, zero, whole.group)
        assert numpy.array_equal(run(one, 4, -(-most // TILE // 4), 1), one.weights()[72:80].astype(numpy.float16))


def test_every_e4m3_number() -> None:
    """Subnormal numbers too; 0x7f and 0xff are NaN, which no checkpoint has."""
    every = numpy.array([number for number in range(256) if number & 0x7F != 0x7F][:248], numpy.uint8)
    x = numpy.zeros((4, 64), numpy.float16)
    x[range(4), range(32, 36)] = 1  # all places in a word
    stored = numpy.tile(every, (64, 1))
    one = Problem("e4m3", x, stored, numpy.ones((1, 1), numpy.float32), numpy.zeros((1, 1), numpy.uint8), 64)
    assert (run(one, 4, 8, 1).astype(float) == linear.value_of_e4m3(every)).all()


@pytest.mark.parametrize("scale", [2.0**-14, 6.1e-5, 2000.0])
def test_extreme_scales(scale: float) -> None:
    usual = linear.problem("int4", 2, 256, 64)
    x = (usual.x / 512).astype(numpy.float16)  # so that results are within fp16's range
    one = Problem("int4", x, usual.stored, numpy.full_like(usual.scale, scale), usual.zero, usual.group)
    check(run(one, 4, 4), one)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_equal_inputs_give_equal_bits_however_the_warps_run(weight: str) -> None:
    """Sums have a fixed order. Nor do results depend on the other rows of a launch with as many rows at most."""
    whole = linear.problem(weight, 8, 640, 112)
    found = run(whole, 7, 2)
    assert numpy.array_equal(found.view("u2"), run(whole, 7, 2).view("u2"))
    alone = Problem(weight, whole.x[5:6].copy(), whole.stored, whole.scale, whole.zero, whole.group)
    assert numpy.array_equal(found[5:6].view("u2"), run(alone, 7, 2).view("u2"))


@pytest.mark.parametrize("variant", [pytest.param(one, id=one.name, marks=pytest.mark.more) for one in VARIANTS])
def test_the_simulated_machine_computes_the_same(variant: LinearVariant) -> None:
    """The machine code that is shipped, for a CTA of a whole launch and one with fewer tiles."""
    whole = linear.problem(variant.weight, variant.rows, 1312, 8 * (variant.tiles * 3 - 1), factor=True, bias=True)
    launch = linear.launch(whole, variant, linear.simulated(variant), 3)
    for cta in (0, 2):
        launch.machine.execute(cta)
        columns = launch.columns_of(cta)
        check(launch.out[:, columns], whole, columns)


def check_unpacked(found: Array, of: Problem, columns: slice = slice(None)) -> None:
    """Without a factor, integers are what the products use, bit for bit. Everything else is rounded once."""
    expected = of.weights(columns).T
    if of.factor is not None:
        expected = expected * of.factor[columns, None].astype(numpy.float64)
    tolerance = 2**-11 * numpy.abs(expected) + 2**-24
    if of.weight != "e4m3" and of.factor is None:
        tolerance *= 0
    assert (numpy.abs(found - expected) <= tolerance).all()


@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_weights_are_unpacked(weight: str, factor: bool) -> None:
    """All tiles, and a slice of them; k ends within a unit."""
    for group, blocks in ((0, False), (128, True), (64, False)):
        whole = linear.problem(weight, 1, 712, 168, group=group, blocks=blocks, factor=factor)
        check_unpacked(linear.unpack(whole, linear.emulated), whole)
        check_unpacked(linear.unpack(whole, linear.emulated, 17, 3), whole, slice(136, 160))


@pytest.mark.more
@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_simulated_machine_unpacks_the_same(weight: str) -> None:
    whole = linear.problem(weight, 1, 328, 32, factor=weight == "int8")
    check_unpacked(linear.unpack(whole, linear.simulated, 1, 2), whole, slice(8, 24))
