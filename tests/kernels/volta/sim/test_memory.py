"""Global, shared, local and constant memory: access widths, costs, and invalid accesses."""

from __future__ import annotations

import numpy
import pytest

from kernels.volta.sim import Simulation, SimulationError, pack_parameters
from tests.kernels.volta.machine import cubin, more, run

COPY = """extern "C" __global__ void copy(const {type}* from, {type}* to, int stride, int n) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) to[i] = from[i * stride];
}}"""


@pytest.mark.parametrize(
    ("kind", "width", "sectors"),
    [more("signed char", 1, 1), more("unsigned short", 2, 2), ("int", 4, 4), more("uint2", 8, 8), ("uint4", 16, 16)],
)
def test_a_copy_of_any_width(kind: str, width: int, sectors: int) -> None:
    data = numpy.random.default_rng(0).integers(0, 256, 200 * width, dtype=numpy.uint8)
    out = numpy.zeros_like(data)
    done = run(COPY.format(type=kind), data, out, numpy.int32(1), numpy.int32(200), grid=2, block=128)
    numpy.testing.assert_array_equal(out, data)
    assert set(done.transactions("LDG")) == {sectors}
    assert set(done.transactions("STG")) == {sectors}


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (8, 32), (64, 32)])
def test_sectors_of_strided_loads(stride: int, sectors: int) -> None:
    data, out = numpy.arange(32 * 64, dtype=numpy.int32), numpy.zeros(32, numpy.int32)
    done = run(COPY.format(type="int"), data, out, numpy.int32(stride), numpy.int32(32))
    numpy.testing.assert_array_equal(out, data[: 32 * stride : stride])
    assert done.transactions("LDG") == [sectors]


def test_small_integers_are_widened_with_and_without_sign() -> None:
    source = """extern "C" __global__ void widen(
        const signed char* a, const unsigned char* b, const short* c, int* out) {
      __shared__ signed char s[32];
      s[threadIdx.x] = a[threadIdx.x];
      __syncwarp();
      out[threadIdx.x] = (s[threadIdx.x ^ 1] << 4 ^ b[threadIdx.x]) + c[threadIdx.x] - a[threadIdx.x];
    }"""
    rng = numpy.random.default_rng(1)
    a, b = rng.integers(-128, 128, 32).astype(numpy.int8), rng.integers(0, 256, 32).astype(numpy.uint8)
    c, out = rng.integers(-(2**15), 2**15, 32).astype(numpy.int16), numpy.zeros(32, numpy.int32)
    run(source, a, b, c, out)
    swapped = a[numpy.arange(32) ^ 1].astype(numpy.int32)
    numpy.testing.assert_array_equal(out, (swapped << 4 ^ b) + c - a)


def shared_kernel(kind: str, index: str) -> str:
    return f"""extern "C" __global__ void banks({kind}* out) {{
      extern __shared__ uint4 memory[];
      volatile unsigned* words = (volatile unsigned*)memory;
      for (int i = threadIdx.x; i < 8192; i += 32) words[i] = i;
      __syncthreads();
      int lane = threadIdx.x;
      out[lane] = (({kind}*)memory)[{index}];
    }}"""


@pytest.mark.parametrize(
    ("kind", "index", "wavefronts"),
    [
        ("unsigned", "lane", 1),
        more("unsigned", "7", 1),  # every thread reads the same word
        more("unsigned", "lane * 33", 1),
        more("unsigned", "lane * 2", 2),
        ("unsigned", "lane * 32", 32),
        more("unsigned", "(lane & 1) * 32 + (lane >> 1)", 1 + 1),
        more("uint2", "lane", 2),
        more("uint2", "lane * 2", 4),
        more("uint2", "(lane & 15) * 16", 2 * 16),
        more("uint4", "lane", 4),
        more("uint4", "lane * 8", 4 * 8),
        more("uint4", "lane >> 3", 4),
        ("uint4", "(lane >> 3) * 8 + ((lane & 7) ^ (lane >> 3))", 4),
    ],
)
def test_bank_conflicts(kind: str, index: str, wavefronts: int) -> None:
    out = numpy.zeros((32, {"unsigned": 1, "uint2": 2, "uint4": 4}[kind]), numpy.uint32)
    done = run(shared_kernel(kind, index), out, shared=32768)
    lane = numpy.arange(32)
    first = eval(index, {"lane": lane}) * out.shape[1] * numpy.ones(32, int)
    numpy.testing.assert_array_equal(out, first[:, None] + numpy.arange(out.shape[1]))
    assert done.transactions("LDS") == [wavefronts]


def test_bank_conflicts_of_stores() -> None:
    source = """extern "C" __global__ void scatter(unsigned* out, int stride) {
      extern __shared__ unsigned words[];
      words[threadIdx.x * stride] = threadIdx.x;
      __syncwarp();
      out[threadIdx.x] = words[threadIdx.x * stride];
    }"""
    for stride, wavefronts in ((1, 1), (4, 4), (32, 32)):
        out = numpy.zeros(32, numpy.uint32)
        done = run(source, out, numpy.int32(stride), shared=4096)
        numpy.testing.assert_array_equal(out, numpy.arange(32))
        assert done.transactions("STS") == [wavefronts]


def test_local_memory() -> None:
    """An array with an index unknown to the compiler is in local memory."""
    source = """extern "C" __global__ void local(const int* order, int* out) {
      int own[40];
      for (int i = 0; i < 40; ++i) own[(i * 7 + threadIdx.x) % 40] = i * 100 + threadIdx.x;
      int sum = 0;
      for (int i = 0; i < 8; ++i) sum = sum * 3 + own[order[i]];
      out[threadIdx.x] = sum;
    }"""
    order, out = numpy.array([39, 0, 13, 13, 2, 38, 21, 5], numpy.int32), numpy.zeros(64, numpy.int32)
    done = run(source, order, out, block=64)
    expected = numpy.zeros(64, numpy.int32)
    for thread in range(64):
        own = {(i * 7 + thread) % 40: i * 100 + thread for i in range(40)}
        for i in order:
            expected[thread] = expected[thread] * 3 + own[int(i)]
    numpy.testing.assert_array_equal(out, expected)
    assert any(opcode.startswith("LDL") for opcode in done.opcodes)
    assert done.simulation.time(done.traces).cycles > 0


def test_constants() -> None:
    source = """__constant__ float table[4] = {1.f, 20.f, 300.f, 4000.f};
    extern "C" __global__ void constants(const int* index, double unused, float scale, float* out) {
      out[threadIdx.x] = table[index[threadIdx.x]] * scale + table[2];
    }"""
    index, out = numpy.arange(32, dtype=numpy.int32) % 4, numpy.zeros(32, numpy.float32)
    run(source, index, numpy.float64(0), numpy.float32(2), out)
    numpy.testing.assert_array_equal(out, numpy.array([1, 20, 300, 4000])[index] * 2 + 300)


# --- faults -----------------------------------------------------------------------------------------------------------

TOUCH = """extern "C" __global__ void touch(int* data, long long index, int write) {
  extern __shared__ int tile[];
  if (write == 0) data[0] = data[index + threadIdx.x];
  if (write == 1) data[index + threadIdx.x] = 1;
  if (write == 2) tile[index + threadIdx.x] = 1;
  if (write == 3) data[0] = tile[index + threadIdx.x];
  if (write == 4) *(int*)((char*)data + index) = 1;
  if (write == 5) asm volatile("trap;");
}"""


@pytest.mark.parametrize(
    ("index", "write", "said"),
    [
        (70, 0, r"LDG\.E\.SYS .* at 0x\w{4}, warp 0: global address 0x700000190 \(4 bytes, lane 30\) is not mapped"),
        (-1, 0, r"global address 0x6fffffffc \(4 bytes, lane 0\) is not mapped"),
        (100, 1, r"STG.* global address 0x700000190 \(4 bytes, lane 0\) is not mapped"),
        (2**40, 1, r"STG.* is not mapped"),
        (33, 2, r"STS.* shared address 0x100 \(4 bytes, lane 31\) lies outside of the CTA's 256 bytes"),
        (-1, 3, r"LDS.* shared address 0xfffffffc \(4 bytes, lane 0\) lies outside"),
        (6, 4, r"STG.* \(4 bytes, lane 0\) is not a multiple of the access's size"),
        (0, 5, r"BPT\.TRAP.*: the kernel stopped itself with a trap"),
    ],
)
def test_invalid_accesses_are_errors(index: int, write: int, said: str) -> None:
    data = numpy.zeros(100, numpy.int32)
    with pytest.raises(SimulationError, match=said):
        run(TOUCH, data, numpy.int64(index), numpy.int32(write), shared=256)


def test_a_read_only_array() -> None:
    data = numpy.zeros(100, numpy.int32)
    data.flags.writeable = False
    with pytest.raises(SimulationError, match=r"STG.* is mapped for reading only"):
        run(TOUCH, data, numpy.int64(0), numpy.int32(1), shared=256)
    assert not data.any()


def test_arrays_that_overlap_or_have_gaps() -> None:
    simulation = Simulation(cubin(TOUCH), "touch")
    simulation.map(numpy.zeros(4, numpy.int32), 0x1000)
    with pytest.raises(SimulationError, match=r"0x1008\.\.0x1018 overlaps 0x1000\.\.0x1010, which is mapped already"):
        simulation.map(numpy.zeros(4, numpy.int32), 0x1008)
    with pytest.raises(ValueError, match="contiguous"):
        simulation.map(numpy.zeros((4, 4), numpy.int32)[:, 1])
    simulation.unmap_all()
    simulation.map(numpy.zeros(4, numpy.int32), 0x1008)


def test_more_local_memory_than_available() -> None:
    source = """extern "C" __global__ void large(const int* order, int* out) {
      int own[4096];
      for (int i = 0; i < 4096; ++i) own[order[i & 7] + i] = i;
      out[threadIdx.x] = own[order[threadIdx.x & 7]];
    }"""
    with pytest.raises(SimulationError, match=r"STL.*: local address .* outside of the thread's 8192 bytes"):
        run(source, numpy.zeros(8, numpy.int32), numpy.zeros(32, numpy.int32))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block": (33, 32, 1)}, "a block must have 1 to 1024 threads, not 33 x 32 x 1"),
        ({"block": (0, 1, 1)}, "threads, not 0 x 1 x 1"),
        ({"grid": (1, 0, 1)}, "every dimension of a grid must be at least 1"),
        ({"parameters": b""}, "touch takes 20 bytes of parameters, not 0"),
        ({"dynamic_shared_bytes": 98305}, "98304 bytes of shared memory, not 98305"),
    ],
)
def test_invalid_launches_are_refused(change: dict[str, object], said: str) -> None:
    simulation = Simulation(cubin(TOUCH), "touch")
    parameters = pack_parameters(numpy.uint64(0), numpy.int64(0), numpy.int32(7))
    arguments = {"grid": (1, 1, 1), "block": (32, 1, 1), "parameters": parameters, **change}
    with pytest.raises(SimulationError, match=said):
        simulation.launch(**arguments)


def test_a_cta_outside_of_the_grid() -> None:
    simulation = Simulation(cubin(TOUCH), "touch")
    simulation.launch((2, 1, 1), (32, 1, 1), pack_parameters(numpy.uint64(0), numpy.int64(0), numpy.int32(7)))
    simulation.execute(1)
    with pytest.raises(SimulationError, match=r"CTA \(2, 0, 0\) is outside of the grid"):
        simulation.execute(2)
