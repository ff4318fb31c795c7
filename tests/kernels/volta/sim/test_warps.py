"""Interaction of lanes and warps: shuffles, votes, divergent branches, barriers, shared memory."""

from __future__ import annotations

import numpy
import pytest

from kernels.volta.sim import Simulation, SimulationError, pack_parameters
from tests.kernels.volta.machine import Array, Listing, cubin, more, run


def lanes(expression: str, values: Array) -> Array:
    """The value of ``expression`` in ``v`` in each lane of one warp."""
    out = numpy.zeros(32, numpy.uint32)
    source = f"""extern "C" __global__ void warp(const unsigned* values, unsigned* out) {{
      unsigned lane = threadIdx.x, v = values[lane], d;
      {expression}
      out[lane] = d;
    }}"""
    run(source, values, out)
    return out


V = numpy.random.default_rng(0).integers(0, 2**32, 32, dtype=numpy.uint32)
LANE = numpy.arange(32)


@pytest.mark.parametrize("width", [32, more(8)])
@pytest.mark.parametrize(
    ("call", "source"),
    [
        ("__shfl_sync(~0u, v, 5, {w})", lambda lane, w: lane // w * w + 5 % w),
        ("__shfl_up_sync(~0u, v, 3, {w})", lambda lane, w: numpy.where(lane % w >= 3, lane - 3, lane)),
        more("__shfl_down_sync(~0u, v, 3, {w})", lambda lane, w: numpy.where(lane % w + 3 < w, lane + 3, lane)),
        ("__shfl_xor_sync(~0u, v, 6, {w})", lambda lane, w: lane ^ 6),
        more("__shfl_sync(~0u, v, lane * 7, {w})", lambda lane, w: lane // w * w + lane * 7 % w),
    ],
)
def test_shuffles(call: str, source: object, width: int) -> None:
    assert callable(source)
    numpy.testing.assert_array_equal(lanes(f"d = {call.format(w=width)};", V), V[source(LANE, width)])


def test_votes() -> None:
    odd = sum(1 << i for i in range(32) if V[i] & 1)
    ballot = "d = __ballot_sync(~0u, v & 1) ^ (__any_sync(~0u, v == 7) << 1) ^ __all_sync(~0u, v != 7);"
    assert set(lanes(ballot, V)) == {odd ^ 1}
    assert set(lanes("d = __ballot_sync(0x0000ffff, v & 1);", V)[:16]) == {odd & 0xFFFF}


@pytest.mark.parametrize(
    "register", ["laneid", "lanemask_lt", *map(more, "lanemask_eq lanemask_le lanemask_gt lanemask_ge".split())]
)
def test_special_registers(register: str) -> None:
    found = lanes(f'asm("mov.u32 %0, %%{register};" : "=r"(d));', V)
    own, below = 1 << LANE, (1 << LANE) - 1
    expected = {
        "laneid": LANE,
        "lanemask_eq": own,
        "lanemask_lt": below,
        "lanemask_le": own | below,
        "lanemask_gt": ~(own | below),
        "lanemask_ge": ~below,
    }[register]
    numpy.testing.assert_array_equal(found, (expected & 0xFFFFFFFF).astype(numpy.uint32))


def test_threads_and_ctas_know_where_they_are() -> None:
    source = """extern "C" __global__ void where(unsigned* out) {
      int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
      out[blockIdx.x * 24 + t] = threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z + 1000 * blockIdx.x
                                 + 10000 * gridDim.x;
    }"""
    out = numpy.zeros(48, numpy.uint32)
    run(source, out, grid=2, block=(4, 3, 2))
    b, z, y, x = numpy.indices((2, 2, 3, 4))
    numpy.testing.assert_array_equal(out, (x + 10 * y + 100 * z + 1000 * b + 20000).ravel())


def test_diverged_lanes_reconverge() -> None:
    """Different numbers of rounds per lane, a branch inside the loop, and a shuffle of all lanes after it."""
    code = """d = 0;
      for (unsigned i = 0; i < (lane & 7); ++i) {
        if ((v >> i) & 1) { d += i * v; } else { for (unsigned j = 0; j < (lane >> 3); ++j) d ^= v >> j; }
      }
      d += __shfl_xor_sync(~0u, d, 1);"""
    expected = []
    for lane in range(32):
        v, d = int(V[lane]), 0
        for i in range(lane & 7):
            if v >> i & 1:
                d = (d + i * v) & 0xFFFFFFFF
            else:
                for j in range(lane >> 3):
                    d ^= v >> j
        expected.append(d)
    both = [(expected[lane] + expected[lane ^ 1]) & 0xFFFFFFFF for lane in range(32)]
    numpy.testing.assert_array_equal(lanes(code, V), both)


def test_lanes_that_leave_a_loop_or_the_kernel() -> None:
    source = """extern "C" __global__ void leave(const unsigned* values, unsigned* out) {
      unsigned lane = threadIdx.x, v = values[lane], d = 0;
      if (lane == 31) return;
      for (;;) {
        d += 1;
        if (v & 1) break;
        v >>= 1;
        if (d > 6) { out[lane] = 99; return; }
      }
      __syncwarp(__activemask());
      out[lane] = d;
    }"""
    out = numpy.zeros(32, numpy.uint32)
    run(source, V, out)
    first = [(int(v) & -int(v)).bit_length() for v in V]
    expected = [0 if lane == 31 else 99 if first[lane] > 7 else first[lane] for lane in range(32)]
    numpy.testing.assert_array_equal(out, expected)


def test_a_switch() -> None:
    """A jump through a table of addresses, with different targets in one warp."""
    code = """switch (lane % 7) {
        case 0: d = v * 3; break;
        case 1: d = v ^ 77; break;
        case 2: d = __popc(v); break;
        case 3: d = v >> 5; break;
        case 4: d = v - lane; break;
        case 5: d = ~v; break;
        default: d = 9;
      }
      d += __shfl_xor_sync(~0u, d, 16);"""
    bits, nine = numpy.bitwise_count(V).astype("u4"), numpy.full(32, 9, "u4")
    cases = [V * 3, V ^ 77, bits, V >> 5, V - LANE.astype("u4"), ~V, nine]
    alone = numpy.choose(LANE % 7, cases)
    numpy.testing.assert_array_equal(lanes(code, V), alone + alone[LANE ^ 16])


def test_waiting_lanes_do_not_wait_for_lanes_that_break_out() -> None:
    """Lanes 0 to 3 are at BSYNC when the others leave its barrier; all lanes reconverge only after that."""
    Listing(
        "S2R R0, SR_LANEID",
        "ISETP.GT.AND P0, PT, R0, 0x3, PT",
        "BSSY B0, 0x60",
        "@P0 BRA 0x80",
        "NOP",
        "BRA 0x60",
        "BSYNC B0",
        "BRA 0x90",
        "BREAK B0",
        "WARPSYNC 0xffffffff",
        "EXIT",
    ).run()


REVERSE = """extern "C" __global__ void reverse(const unsigned* values, unsigned* out, int n) {
  extern __shared__ unsigned tile[];
  for (int round = 0; round < 3; ++round) {
    tile[threadIdx.x] = values[round * n + threadIdx.x];
    __syncthreads();
    out[round * n + threadIdx.x] = tile[n - 1 - threadIdx.x];
    __syncthreads();
  }
}"""


@pytest.mark.parametrize("threads", [32, 40, 128, 1024])
def test_shared_memory_and_barriers(threads: int) -> None:
    values = numpy.arange(3 * threads, dtype=numpy.uint32)
    out = numpy.zeros_like(values)
    run(REVERSE, values, out, numpy.int32(threads), block=threads, shared=4 * threads)
    numpy.testing.assert_array_equal(out.reshape(3, -1), values.reshape(3, -1)[:, ::-1])


def test_warps_that_have_ended_are_not_waited_for() -> None:
    source = """extern "C" __global__ void early(unsigned* out) {
      __shared__ unsigned cell;
      if (threadIdx.x >= 64) return;
      if (threadIdx.x == 0) cell = 41;
      __syncthreads();
      out[threadIdx.x] = cell + 1;
    }"""
    out = numpy.zeros(64, numpy.uint32)
    run(source, out, block=128)
    assert set(out) == {42}


PRODUCER = """extern "C" __global__ void hand_over(unsigned* out) {
  __shared__ unsigned cell;
  if (threadIdx.x < 32) {
    asm volatile("bar.sync 1, 64;" ::: "memory");
    out[threadIdx.x] = cell;
  } else {
    if (threadIdx.x == 32) cell = 7;
    asm volatile("bar.arrive 1, 64;" ::: "memory");
  }
}"""


def test_a_producer_arrives_at_a_barrier_without_waiting() -> None:
    out = numpy.zeros(32, numpy.uint32)
    done = run(PRODUCER, out, block=64)
    assert set(out) == {7}
    assert done.simulation.time(done.traces).cycles > 0


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("atomicAdd(&cell, v)", int(V.sum(dtype=numpy.uint64)) + 5 & 0xFFFFFFFF),
        ("atomicMax(&cell, v)", int(V.max())),
        more("atomicMin(&cell, v)", min(5, int(V.min()))),
        more("atomicOr(&cell, v)", 5 | int(numpy.bitwise_or.reduce(V))),
        more("atomicAnd(&cell, v)", 5 & int(numpy.bitwise_and.reduce(V))),
        more("atomicXor(&cell, v)", 5 ^ int(numpy.bitwise_xor.reduce(V))),
        more("atomicExch(&cell, v)", int(V[31])),
    ],
)
def test_atomic_operations_on_shared_memory(operation: str, expected: int) -> None:
    code = f"__shared__ unsigned cell; cell = 5; __syncwarp(); {operation}; __syncwarp(); d = cell;"
    assert set(lanes(code, V)) == {expected}


# --- deadlocks --------------------------------------------------------------------------------------------------------


def test_a_barrier_that_other_warps_never_reach() -> None:
    source = """extern "C" __global__ void stuck() {
      if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;"); else asm volatile("bar.sync 2, 64;");
    }"""
    with pytest.raises(SimulationError, match=r"the CTA is deadlocked: warp 0 at barrier 1, warp 1 at barrier 2"):
        run(source, block=64)


def test_an_endless_loop_is_an_error() -> None:
    source = """extern "C" __global__ void forever(volatile unsigned* flag) { while (*flag == 0) {} }"""
    simulation = Simulation(cubin(source), "forever")
    flag = simulation.map(numpy.zeros(1, numpy.uint32))
    simulation.launch((1, 1, 1), (32, 1, 1), pack_parameters(numpy.uint64(flag)))
    simulation.set_instruction_limit(100_000)
    with pytest.raises(SimulationError, match="warp 0 has executed 100000 instructions, so it probably never ends"):
        simulation.execute(0)
