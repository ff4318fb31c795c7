"""The timing model: microbenchmarks against published V100 measurements, and rules that times must obey.

Sources: Jia et al., "Dissecting the NVIDIA Volta GPU architecture via microbenchmarking", arXiv 1804.06826 (latencies
of instructions and memories); the CUDA C++ Programming Guide's throughputs for compute capability 7.0.
"""

from __future__ import annotations

import numpy
import pytest

from kernels.volta.sim import V100, Occupancy, SimulationError, default_timing, static_bound
from kernels.volta.sim.library import library
from kernels.volta.sim.simulation import FIRST_ADDRESS
from tests.kernels.volta.machine import Array, Listing, Run, control, more, run

ROUNDS = 128


def cycles(done: Run, copies: int = 1, **changes: float) -> int:
    timing = default_timing(**changes) if changes else None
    return done.simulation.time(done.traces * copies, timing=timing).cycles


def per_round(
    body: str, *, warps: int = 1, setup: str = "", finish: str = "x", data: Array | None = None, **changes: float
) -> float:
    """Cycles that one more round of ``body`` takes on one SM, in a loop that is unrolled 128 times.

    The loop's own branch is included: about 10 cycles per 128 rounds.

    ``words``: 16 KiB of shared memory in which every word holds ``base``, its address.
    """
    content = numpy.zeros(1024, numpy.uint32) if data is None else data
    source = f"""extern "C" __global__ void bench(unsigned* data, unsigned* out, int rounds) {{
      __shared__ unsigned words[4096];
      unsigned lane = threadIdx.x & 31, x = data[lane], base = (unsigned)__cvta_generic_to_shared(words);
      for (int i = threadIdx.x; i < 4096; i += blockDim.x) words[i] = base;
      {setup}
      __syncthreads();
      asm volatile("" :: "r"(base) : "memory");
      #pragma unroll 1
      for (int j = 0; j < rounds; j += {ROUNDS}) {{
        #pragma unroll
        for (int i = 0; i < {ROUNDS}; ++i) {{ {body} }}
      }}
      out[threadIdx.x] = {finish};
    }}"""

    def total(rounds: int) -> int:
        out = numpy.zeros(1024, numpy.uint32)
        return cycles(run(source, content, out, numpy.int32(rounds), block=32 * warps), **changes)

    return (total(5 * ROUNDS) - total(3 * ROUNDS)) / (2 * ROUNDS)


FMA = 'asm volatile("fma.rn.f32 %0, %0, %0, %0;" : "+f"(f));'
MMA_SETUP = "float d[8] = {}; unsigned a = x, b = x;"
MMA = """asm volatile("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%8}, {%9,%9}, "
         "{%0,%1,%2,%3,%4,%5,%6,%7};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
         "+f"(d[6]), "+f"(d[7]) : "r"(a), "r"(b));"""
MMA_SUM = "__float_as_uint(d[0] + d[1] + d[2] + d[3] + d[4] + d[5] + d[6] + d[7])"


CHAIN = 'asm volatile("ld.global.ca.u64 %0, [%0];" : "+l"(p));'
START = "unsigned long long p = *(unsigned long long*)data;"


def ring(entries: int, distance: int) -> Array:
    """A ring of pointers, each to the next one ``distance`` bytes on, as the first mapped array."""
    pointers = numpy.zeros(entries * distance // 8, numpy.uint64)
    for i in range(entries):
        pointers[i * distance // 8] = FIRST_ADDRESS + (i + 1) % entries * distance
    return pointers


class TestLatencies:
    def test_fp16(self) -> None:
        """6 cycles (Jia et al., table 4.1)."""
        body = 'asm volatile("fma.rn.f16x2 %0, %0, %0, %0;" : "+r"(x));'
        assert per_round(body) == pytest.approx(6, abs=0.1)

    def test_fp32(self) -> None:
        """4 cycles (Jia et al., table 4.1)."""
        assert per_round(FMA, setup="float f = x;", finish="__float_as_uint(f)") == pytest.approx(4, abs=0.1)

    def test_shared_memory(self) -> None:
        """19 cycles (Jia et al., table 3.1): the result of each load is the address of the next one."""
        body = 'asm volatile("ld.shared.u32 %0, [%0];" : "+r"(base));'
        assert per_round(body, finish="base") == pytest.approx(19, abs=2)

    def test_l1(self) -> None:
        """28 cycles (Jia et al., table 3.1)."""
        assert per_round(CHAIN, setup=START, finish="(unsigned)p", data=ring(1, 1024)) == pytest.approx(28, abs=3)

    def test_l2(self) -> None:
        """193 cycles (Jia et al., table 3.1)."""
        latency = per_round(CHAIN, setup=START, finish="(unsigned)p", data=ring(64, 64), l1_kib=1)
        assert latency == pytest.approx(193, abs=12)

    def test_a_matrix_product_waits_for_the_one_before_it(self) -> None:
        """8 cycles for each m8n8k4 of a chain, which is how long it occupies the tensor core."""
        assert per_round(MMA, setup=MMA_SETUP, finish=MMA_SUM) == pytest.approx(8, abs=0.7)


class TestThroughputs:
    """Results per cycle and SM for compute capability 7.0, Programming Guide, "Arithmetic Instructions"."""

    def test_tensor_cores(self) -> None:
        """1024 FLOP per cycle and SM: 125 TFLOPS at 1530 MHz and 80 SMs."""
        flops = 4 * 2 * 8 * 8 * 4 * 8  # quadpairs, one 8x8x4 product each, 8 warps
        assert flops / per_round(MMA, warps=8, setup=MMA_SETUP, finish=MMA_SUM) == pytest.approx(1024, rel=0.02)

    def test_fp32(self) -> None:
        each = per_round(FMA, warps=8, setup="float f = x;", finish="__float_as_uint(f)")
        assert 8 * 32 / each == pytest.approx(64, rel=0.03)

    def test_special_functions(self) -> None:
        body = 'for (int j = 0; j < 4; ++j) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(f[j]));'
        finish = "__float_as_uint(f[0] + f[1] + f[2] + f[3])"
        each = per_round(body, warps=4, setup="float f[4] = {x * 1.f, x * 2.f, x * 3.f, x * 4.f};", finish=finish)
        assert 4 * 4 * 32 / each == pytest.approx(16, rel=0.02)

    def test_conversions_to_fp16(self) -> None:
        body = 'asm volatile("{.reg .b16 h; cvt.rn.f16.f32 h, %0; mov.b32 %0, {h, h};}" : "+f"(f));'
        each = per_round(body, warps=16, setup="float f = x;", finish="__float_as_uint(f)")
        assert 16 * 32 / each == pytest.approx(16, rel=0.02)

    @pytest.mark.parametrize(("stride", "wavefronts"), [(1, 1), more(2, 2), more(4, 4), (8, 8), more(32, 32)])
    def test_shared_memory(self, stride: int, wavefronts: int) -> None:
        """One wavefront of 128 bytes per cycle for the whole SM; bank conflicts multiply the wavefronts."""
        load = "{.reg .u32 t; ld.volatile.shared.u32 t, [%1]; add.u32 %0, %0, t;}"
        body = f'asm volatile("{load}" : "+r"(x) : "r"(address));'
        setup = f"unsigned address = base + lane * {4 * stride};"
        each = per_round(body, warps=16, setup=setup)
        assert each / 16 == pytest.approx(wavefronts, rel=0.1)


STREAM = """extern "C" __global__ void stream(const uint4* from, unsigned* out, int rounds) {
  uint4 sum = {};
  #pragma unroll 8
  for (int i = 0; i < rounds; ++i) {
    uint4 v = from[(blockIdx.x * rounds + i) * blockDim.x + threadIdx.x];
    sum.x ^= v.x; sum.y ^= v.y; sum.z ^= v.z; sum.w ^= v.w;
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum.x ^ sum.y ^ sum.z ^ sum.w;
}"""


@pytest.fixture(scope="module")
def stream() -> Run:
    """4 CTAs of 256 threads read 64 KiB each; the result is checked."""
    rng = numpy.random.default_rng(0)
    data = rng.integers(0, 2**32, (4, 16, 256, 4), dtype=numpy.uint32)
    out = numpy.zeros((4, 256), numpy.uint32)
    done = run(STREAM, data, out, numpy.int32(16), grid=4, block=256)
    expected: Array = numpy.bitwise_xor.reduce(numpy.bitwise_xor.reduce(data, axis=1), axis=2)
    numpy.testing.assert_array_equal(out, expected)
    return done


class TestMemory:
    @pytest.mark.parametrize("rate", [4.0, 8.0, 19.5])
    def test_a_stream_runs_at_the_speed_of_l2(self, stream: Run, rate: float) -> None:
        time = stream.simulation.time(stream.traces, timing=default_timing(l2_bytes_per_cycle=rate))
        assert time.l2_bytes == 4 * (65536 + 1024)
        assert time.l1_hits == 0
        # Nothing waits for the stores at the end; the remaining time is spent waiting for the first data.
        assert 4 * 65536 / rate < time.cycles < time.l2_bytes / rate + 900

    def test_repeated_reads_come_from_l1(self, stream: Run) -> None:
        small = default_timing(l1_kib=128)
        twice = stream.simulation.time([stream.traces[0]] * 2, resident=1, timing=small)
        assert twice.l1_hits == twice.l1_misses == 2048

    def test_a_higher_memory_latency_takes_longer(self, stream: Run) -> None:
        one = [stream.traces[0]]
        near, far = (stream.simulation.time(one, timing=default_timing(l2_latency=n)).cycles for n in (192, 450))
        assert far - near >= 2 * (450 - 192)  # 16 loads, at most 8 at a time


class TestOneSm:
    def test_nothing_is_faster_than_its_bound(self, stream: Run) -> None:
        bound = static_bound(stream.simulation, stream.traces[0])
        assert list(bound.values()) == sorted(bound.values(), reverse=True)
        assert next(iter(bound)) == "L2"
        assert stream.simulation.time([stream.traces[0]]).cycles > bound["L2"]

    def test_every_instruction_is_issued(self, stream: Run) -> None:
        time = stream.simulation.time(stream.traces)
        assert time.issued == sum(int(trace.executions.sum()) for trace in stream.traces)
        assert sum(spot.executions for spot in time.hot_spots) == time.issued
        assert [spot.waited for spot in time.hot_spots] == sorted((s.waited for s in time.hot_spots), reverse=True)

    def test_timing_is_deterministic(self, stream: Run) -> None:
        first, second = (stream.simulation.time(stream.traces * 3, resident=2) for _ in range(2))
        assert first == second

    def test_more_resident_ctas_hide_more_latency(self, stream: Run) -> None:
        timing = default_timing(l2_bytes_per_cycle=1000)
        alone, together = (stream.simulation.time(stream.traces, resident=n, timing=timing).cycles for n in (1, 4))
        assert together < 0.7 * alone

    def test_a_cta_costs_the_same_after_another_one(self) -> None:
        """A new CTA does not wait for what the previous one still waited for when it ended."""
        load, use = ("LDC R0, c[0x3][R0]", control(writes=0)), ("NOP", control(waits=1))
        listing = Listing(load, use, load, use, ("LDC R2, c[0x3][RZ]", control(writes=0)), "EXIT")
        listing.check(library().fa_sim_set_constants(listing.handle, 3, bytes(16), 16))
        times = [listing.cycles(ctas=n, constant_load_latency=1000) for n in (1, 2, 3)]
        assert times[0] > 2000
        assert numpy.diff(times) == pytest.approx(times[0], abs=40)

    def test_a_barrier_waits_for_the_last_warp(self) -> None:
        source = """extern "C" __global__ void skewed(const volatile unsigned* data, unsigned* out, int barrier) {
          unsigned x = 0;
          if (threadIdx.x < 32) for (int i = 0; i < 32; ++i) x = data[x];
          if (barrier) __syncthreads();
          if (threadIdx.x >= 32) for (int i = 0; i < 32; ++i) x = data[x];
          out[threadIdx.x] = x;
        }"""
        data, out = numpy.zeros(32, numpy.uint32), numpy.zeros(64, numpy.uint32)
        together = cycles(run(source, data, out, numpy.int32(0), block=64))
        in_turn = cycles(run(source, data, out, numpy.int32(1), block=64))
        assert in_turn > 1.7 * together

    def test_a_taken_branch_costs_its_latency(self) -> None:
        straight, jumps = Listing("NOP", "NOP", "EXIT"), Listing("BRA 0x20", "NOP", "NOP", "EXIT")
        assert jumps.cycles(branch_latency=50) - straight.cycles(branch_latency=50) == 50

    def test_a_barrier_opens_after_its_latency(self) -> None:
        listing = Listing("BAR.SYNC 0x0", "EXIT")
        assert listing.cycles(64, barrier_latency=110) - listing.cycles(64, barrier_latency=10) == 100

    def test_a_warp_that_ends_opens_the_barrier_for_the_others(self) -> None:
        work = [("NOP", control(stall=15))] * 8
        listing = Listing(
            "S2R R0, SR_TID.X", "ISETP.GT.U32.AND P0, PT, R0, 0x1f, PT", "@!P0 BAR.SYNC 0x0", "@!P0 EXIT", *work, "EXIT"
        )
        assert listing.cycles(64) > 8 * 15

    def test_an_atomic_operation_reads_and_writes(self) -> None:
        atomic = Listing("ATOMS.ADD R0, [RZ], R1", *["ATOMS.ADD R0, [RZ], R1"] * 63, "EXIT")
        load = Listing(*["LDS R0, [RZ]"] * 64, "EXIT")
        assert atomic.cycles(256) == pytest.approx(2 * load.cycles(256), rel=0.05)

    def test_a_wide_load_of_few_lanes(self) -> None:
        """It returns one register per cycle, however few lanes take part."""
        few = ["S2R R8, SR_LANEID", "ISETP.LT.U32.AND P0, PT, R8, 0x4, PT"]
        wide, narrow = (Listing(*few, *[f"@P0 LDS{size} R0, [RZ]"] * 64, "EXIT") for size in (".128", ""))
        assert wide.cycles(256) - narrow.cycles(256) == pytest.approx(3 * 64 * 8, rel=0.05)

    def test_invalid_timing_parameters_are_refused(self, stream: Run) -> None:
        with pytest.raises(TypeError, match=r"l3_latency is not a parameter of the timing: .*l2_latency"):
            default_timing(l3_latency=5)
        for changes, said in (
            ({"l2_latency": -1}, "must not be negative, but one is -1"),
            ({"memory_queue": 0}, "must be at least 1, not 0"),
            ({"l2_bytes_per_cycle": 0.0}, "l2_bytes_per_cycle must be more than 0"),
        ):
            with pytest.raises(SimulationError, match=said):
                stream.simulation.time(stream.traces, timing=default_timing(**changes))
        with pytest.raises(ValueError, match="no trace was recorded"):
            stream.simulation.time([])

    def test_dropped_traces_are_refused(self) -> None:
        done = run(STREAM, numpy.zeros(64, numpy.uint32), numpy.zeros(16, numpy.uint32), numpy.int32(1), block=16)
        done.simulation.drop_traces()
        with pytest.raises(SimulationError, match="there is no trace 0"):
            done.simulation.time(done.traces)


class TestGpu:
    @pytest.mark.parametrize(
        ("threads", "registers", "shared", "ctas"),
        [
            (128, 255, 0, 2),  # 8 warps of 255 registers fill the register file
            (128, 168, 17920, 3),
            (128, 64, 25600, 3),
            (256, 128, 0, 2),
            (1024, 32, 0, 2),
            (32, 16, 0, 32),
            (96, 40, 49153, 1),
        ],
    )
    def test_occupancy(self, threads: int, registers: int, shared: int, ctas: int) -> None:
        assert Occupancy.of(V100, threads=threads, registers=registers, shared_bytes=shared).ctas == ctas

    def test_l1_gets_the_space_that_shared_memory_leaves(self) -> None:
        assert [V100.l1_kib(kib * 1024) for kib in (0, 1, 8, 33, 64, 96)] == [128, 120, 120, 64, 64, 32]
