"""The emulator itself, and the attention kernels' sources on it: random problems against float64."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.attention.volta import launch as volta_kernels
from fastattention_vllm.attention.volta.launch import DECODE_ROWS, HEAD_SIZES, TURING, VOLTA, WIDE_ROWS
from kernels.volta import variants
from kernels.volta.emulator import Emulation, EmulationError
from kernels.volta.sim import pack_parameters
from tests.attention.oracle import Case
from tests.kernels.volta import attention, machine
from tests.kernels.volta.attention import SOURCES, emulated, simulated
from tests.kernels.volta.machine import Array, more

FP16 = torch.float16


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one torch thread: the oracle's operations are small, and several threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the emulator -----------------------------------------------------------------------------------------------------

HEADER = """#include "device.cuh"
#include "pair.cuh"
namespace fastattention {
struct Arguments { float* floats; unsigned* words; int which; };
extern "C" __global__ void small(const Arguments a) {
  extern __shared__ uint4 shared[];
  float* const numbers = reinterpret_cast<float*>(shared);
  const int lane = threadIdx.x;
"""


def emulation(body: str, folder: Path, **options: Any) -> Emulation:
    source = folder / "small.cu"
    source.write_text(HEADER + body + "}}\n")
    return Emulation(source, "small", **options)


def run(
    body: str,
    folder: Path,
    floats: Array | None = None,
    words: Array | None = None,
    threads: int = 32,
    which: int = 0,
    **options: Any,
) -> None:
    """One block of a kernel with 1024 bytes of shared memory. ``floats`` and ``words`` are changed in place."""
    kernel = emulation(body, folder, **options)
    arrays = [numpy.zeros(0, numpy.float32) if array is None else array for array in (floats, words)]
    parameters = pack_parameters(*(numpy.uint64(kernel.map(array)) for array in arrays), numpy.int64(which))
    kernel.launch((1, 1, 1), (threads, 1, 1), parameters, 1024)
    kernel.execute(0)


MULTIPLY = """  float d[8];
  for (int i = 0; i < 8; ++i) d[i] = a.floats[8 * lane + i];
  const unsigned* const w = a.words + 4 * lane;
  multiply_by_KIND(d, w[0], w[1], w[2], w[3]);
  for (int i = 0; i < 8; ++i) a.floats[8 * lane + i] = d[i];
"""


@pytest.mark.parametrize("kind", ["columns", "rows"])
def test_products_equal_those_of_the_simulated_machine(kind: str, tmp_path: Path) -> None:
    """m8n8k4 of four quadpairs with random lanes equals the compiled instruction on the simulator."""
    rng = numpy.random.default_rng(0)
    words = rng.standard_normal((32, 8)).astype(numpy.float16).view(numpy.uint32)
    floats = rng.standard_normal((32, 8)).astype(numpy.float32)
    expected = floats.copy()
    body = MULTIPLY.replace("KIND", kind)
    device = "".join((SOURCES / name).read_text() for name in ("instructions.cuh", "problem.h", "device.cuh"))
    source = "\n".join(line for line in device.splitlines() if not line.startswith('#include "'))
    kernel = (
        HEADER.replace('#include "device.cuh"', "")
        .replace('#include "pair.cuh"', "")
        .replace("const Arguments a", "float* floats, unsigned* words")
    )
    machine.run(source + kernel + "const Arguments a{floats, words, 0};\n" + body + "}}", expected, words)
    run(body, tmp_path, floats, words)
    numpy.testing.assert_allclose(floats, expected, rtol=0, atol=1e-5)


TURING_PRODUCT = """  Half* const halves = reinterpret_cast<Half*>(shared);  // a: 16 rows, b: 8 rows, of 8 numbers each
  for (int i = lane; i < 24 * 8; i += 32) halves[i] = static_cast<Half>(a.words[i]);
  __syncthreads();
  u32 left[2], right[4], same[2];
  load_matrices(left, shared, lane & 15, 0);
  load_transposed_matrices(right, shared, (lane & 7) ^ 17, 1);  // rows 16 to 23 of the tile, by way of its swizzle
  load_matrices(same, shared + 16, lane & 7, 0);
  if (transpose_matrix(same[0]) != right[0]) a.floats[0] = 1.0f;
  float d[4];
  const int row = lane / 4, column = lane % 4 * 2;
  for (int e = 0; e < 4; ++e) d[e] = a.floats[8 * (row + 8 * (e / 2)) + column + e % 2];
  multiply_16x8(d, left[0], left[1], right[0]);
  for (int e = 0; e < 4; ++e) a.floats[8 * (row + 8 * (e / 2)) + column + e % 2] = d[e];
"""


def test_turings_products(tmp_path: Path) -> None:
    """ldmatrix, ldmatrix.trans, movmatrix and m16n8k8 together give c + a b as numpy computes it."""
    rng = numpy.random.default_rng(0)
    a, b = (rng.standard_normal((rows, 8)).astype(numpy.float16) for rows in (16, 8))
    c = rng.standard_normal((16, 8)).astype(numpy.float32)
    words = numpy.concatenate([a, b]).view(numpy.uint16).astype(numpy.uint32)
    found = c.copy()
    run(TURING_PRODUCT, tmp_path, found, words, architecture="sm_75")
    numpy.testing.assert_allclose(found, c + a.astype(numpy.float64) @ b.astype(numpy.float64), atol=1e-5)


def test_shuffles(tmp_path: Path) -> None:
    floats = numpy.arange(64, dtype=numpy.float32)
    body = """  const float mine = a.floats[lane];
  a.floats[lane] = __shfl_sync(~0u, mine, 5);
  a.floats[32 + lane] = of_lane_xor(mine, 12);
"""
    run(body, tmp_path, floats)
    assert (floats[:32] == 5).all()
    assert (floats[32:] == numpy.arange(32) ^ 12).all()


def test_packed_weights(tmp_path: Path) -> None:
    """fp16 of numbers in its whole range, also below its normal numbers; ties go up."""
    floats = numpy.concatenate(
        [
            [0, 1, 1 + 2**-11, 1 + 3 * 2**-11, 256, 65504, 2**-24, 2**-25, 2**-26, 3e-39],
            2 ** numpy.linspace(-27, 15, 54),
        ]
    ).astype(numpy.float32)
    words = numpy.zeros(32, numpy.uint32)
    run("  a.words[lane] = pack_weights(a.floats[2 * lane], a.floats[2 * lane + 1]);\n", tmp_path, floats, words)
    expected = floats.astype(numpy.float16)
    expected[[2, 7]] = [1 + 2**-10, 2**-24]
    numpy.testing.assert_array_equal(words.view(numpy.float16), expected)


def test_bits_of_nan_are_the_gpus(tmp_path: Path) -> None:
    """Arithmetic has one NaN, whose packed weight is 0. x86 keeps the bits of an operand, or sets the sign."""
    words = numpy.zeros(4, numpy.uint32)
    floats = numpy.array([0x7FC00000, 0x7F800001, 0xFFC00000, 0x7F800000], numpy.uint32).view(numpy.float32)
    body = """  if (lane != 0) return;
  a.words[0] = __float_as_int(multiply(a.floats[0], 2.0f)); a.words[1] = __float_as_int(a.floats[3] - a.floats[3]);
  a.words[2] = pack(a.floats[1], a.floats[2]); a.words[3] = pack_weights(a.floats[0], 1.0f);
"""
    run(body, tmp_path, floats, words)
    assert words.tolist() == [0x7FFFFFFF, 0x7FFFFFFF, 0x7FFF7FFF, 0x3C000000]


def test_two_warps_wait_for_each_other_alone(tmp_path: Path) -> None:
    """Each pair passes numbers twice through shared memory. Its partner's barrier also orders what follows it."""
    floats = numpy.arange(128, dtype=numpy.float32)
    body = """  numbers[lane] = a.floats[lane];
  wait_for_pair(1 + lane / 64);
  const float other = numbers[lane ^ 32];
  numbers[lane ^ 32] = 2 * other;
  wait_for_pair(1 + lane / 64);
  a.floats[lane] = numbers[lane] + other;
"""
    run(body, tmp_path, floats, threads=128)
    mine = numpy.arange(128)
    numpy.testing.assert_array_equal(floats, 2 * mine + (mine ^ 32))


def test_functions(tmp_path: Path) -> None:
    """exp2 without subnormal numbers, rounding to the nearest fp16, soft caps, division by a multiplier."""
    words = numpy.zeros(8, numpy.uint32)
    floats = numpy.zeros(8, numpy.float32)
    body = """  if (lane != 0) return;
  a.floats[0] = exp2(3.5f); a.floats[1] = exp2(-127.0f); a.floats[2] = exp2(-infinity());
  a.floats[3] = tanh(0.7f); a.floats[4] = tanh(60.0f); a.floats[5] = __fdividef(1.0f, 2e38f);
  a.words[0] = pack(1.0f + 3.0f / 2048, -65504.0f); a.words[1] = divide(784 * 5 - 1, Divisor{784, 0xa72f053au, 10});
"""
    run(body, tmp_path, floats, words)
    numpy.testing.assert_allclose(floats[:6], [2**3.5, 0, 0, numpy.tanh(0.7), 1, 0], rtol=1e-6)
    assert words[:1].view(numpy.float16).tolist() == [1 + 4 / 2048, -65504]
    assert words[1] == 4


THREADS = {"a third warp's number, behind a barrier of two": 96, "a shuffle in half a warp": 80}
"""Number of threads for the cases that do not have 64."""
FAILURES = {
    "a shuffle of some lanes": (
        "if (lane < 16) a.floats[lane] = __shfl_sync(~0u, 1.0f, 0);",
        r"thread 16 of block \(0, 0, 0\) is at its end, but thread 0 of its warp is at a shuffle\.",
    ),
    "two barriers": (
        "if (lane < 16) __syncwarp(); else __syncthreads();",
        r"thread 16 .* is at a barrier of the block, but thread 0 of its warp is at a barrier of the warp\.",
    ),
    "two products": (
        "float d[8] = {}; if (lane & 1) multiply_by_rows(d, 0, 0, 0, 0); else multiply_by_columns(d, 0, 0, 0, 0);",
        r"thread 1 .* is at a matrix product, but thread 0 of its warp is at a matrix product",
    ),
    "a barrier that a warp misses": (
        "if (lane < 32) __syncthreads();",
        r"thread 0 .* is at a barrier of the block, but thread 32 has ended\.",
    ),
    "a barrier of two warps that one misses": (
        "if (lane < 32) wait_for_pair(1);",
        r"thread 0 .* is at a barrier of two warps, but no other warp reaches it\.",
    ),
    "barriers of two warps with different numbers": (
        "wait_for_pair(1 + lane / 32);",
        "is at a barrier of two warps, but no other warp reaches it",
    ),
    "a third warp's number, behind a barrier of two": (
        "numbers[lane] = 0; __syncthreads(); numbers[lane] = lane; if (lane < 64) wait_for_pair(1); "
        "a.floats[lane & 63] = numbers[(lane + 64) % 96];",
        "with no barrier since thread",
    ),
    "a shuffle in half a warp": (
        "a.floats[lane] = __shfl_sync(~0u, 1.0f, 0);",
        "thread 64 .* is at a shuffle, but its warp has only 16 threads",
    ),
    "rows of matrices behind shared memory": (
        "u32 x[4]; load_matrices(x, shared + 64, lane & 31, 0);",
        r"thread \d+ .* reads 16 bytes at 1\d\d\d of shared memory, which has only 1024 bytes",
    ),
    "a mask": ("__syncwarp(3);", "uses a mask of some lanes, but the emulator supports"),
    "behind shared memory": (
        "numbers[256 - 31 + lane] = 0.0f;",
        r"thread \d+ .* writes 4 bytes at 10\d\d of shared memory, which has only 1024 bytes\.",
    ),
    "a vector across chunks": (
        "numbers[lane] = 0; __syncthreads(); uint4 x = *reinterpret_cast<uint4*>(numbers + 1); a.floats[lane] = x.y;",
        "reads 16 bytes at an address that is not a multiple of 16",
    ),
    "nothing was written": ("a.floats[lane] = numbers[lane];", "at .* of shared memory, which has not been written"),
    "another lane's number, at once": (
        "numbers[lane] = 0; __syncthreads(); numbers[lane] = lane; a.floats[lane] = numbers[lane ^ 1];",
        r"thread \d+ .* 4 bytes at \d+ of shared memory with no barrier since thread \d+ (wrote|read) there\.",
    ),
    "another warp's number, behind a barrier of the warp": (
        "numbers[lane] = 0; __syncthreads(); numbers[lane] = lane; __syncwarp(); a.floats[lane] = numbers[lane ^ 32];",
        "with no barrier since thread",
    ),
    "a number that others still read": (
        "if (lane == 0) numbers[0] = 1; __syncthreads(); a.floats[lane] = numbers[0]; if (lane == 40) numbers[0] = 2;",
        r"(writes .* with no barrier since (several threads|thread \d+) read|reads .* since thread 40 wrote)",
    ),
    "behind a tensor": ("a.floats[lane + 33] = 0;", r"thread \d+ .* writes 4 bytes outside of all tensors"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for one source that contains all of them, so that it is compiled once."""
    return tmp_path_factory.mktemp("failures")


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("seed", [0, 1])
def test_errors_of_threads_are_reported(name: str, seed: int, folder: Path) -> None:
    bodies = "".join(f"  if (a.which == {i}) {{\n{body}\n  }}\n" for i, (body, _) in enumerate(FAILURES.values()))
    options = {"threads": THREADS.get(name, 64), "which": list(FAILURES).index(name), "seed": seed}
    with pytest.raises(EmulationError, match=FAILURES[name][1]):
        run(bodies, folder, numpy.zeros(64, numpy.float32), architecture="sm_75", **options)


def test_launches_beyond_the_limits_are_refused(tmp_path: Path) -> None:
    kernel = emulation("", tmp_path)
    with pytest.raises(EmulationError, match=r"call launch\(\) first"):
        kernel.execute(0)
    for block, shared, said in (
        ((1056, 1, 1), 0, "a block has 1056 threads, but can have 1 to 1024"),
        ((32, 2, 1), 0, "the emulator runs one-dimensional blocks only"),
        ((32, 1, 1), 98305, "at most 98304 bytes of shared memory, not 98305"),
    ):
        kernel.launch((1, 1, 1), block, bytes(24), shared)
        with pytest.raises(EmulationError, match=said):
            kernel.execute(0)
    with pytest.raises(ValueError, match="must be contiguous"):
        kernel.map(numpy.zeros((4, 4))[:, 1])


def test_a_kernel_that_does_not_compile(tmp_path: Path) -> None:
    with pytest.raises(EmulationError, match=r"(?s)kernel does not compile for the emulator:\n.*small\.cu"):
        emulation("no such thing", tmp_path)


# --- attention --------------------------------------------------------------------------------------------------------

SOON = ((64, VOLTA), (80, VOLTA), (64, TURING), (256, TURING))
"""Kernels for which `make test` draws problems. They include partial columns and 16 rows per warp."""


def kinds() -> list[Any]:
    every = [(size, architecture) for size in HEAD_SIZES for architecture in (VOLTA, TURING)]
    return [kind if kind in SOON else more(*kind) for kind in every]


@st.composite
def cases(draw: st.DrawFn, head_size: int, max_rows: int, max_keys: int) -> Case:
    """``max_rows`` limits query tokens times query heads per KV head of each sequence."""
    kv_heads = draw(st.sampled_from([1, 1, 2]))
    group = draw(st.sampled_from([g for g in (1, 2, 4, 5, 6, 8, 12) if g <= max_rows]))
    lengths = draw(
        st.lists(st.tuples(st.integers(1, max_rows // group), st.integers(1, max_keys)), min_size=1, max_size=2)
    )
    page_size = draw(st.sampled_from([0, 16, 32, 784]))
    return Case(
        [new for new, _ in lengths],
        [keys for _, keys in lengths],
        kv_heads * group,
        kv_heads,
        head_size,
        page_size,
        FP16,
        layout=draw(st.sampled_from(["HND", "NHD"])),
        causal=draw(st.booleans()),
        window=(draw(st.sampled_from([-1, 0, 3, 40])), draw(st.sampled_from([-1, -1, 0, 7]))),
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0])),
        alibi=draw(st.sampled_from(["", "", "shared"])),
        sinks=draw(st.sampled_from([None, None, 0.0])),
        padding=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize(("head_size", "architecture"), kinds())
@settings(max_examples=10)
@given(st.data())
def test_prefill(head_size: int, architecture: int, data: st.DataObject) -> None:
    """Cases include fewer keys than queries, where the first rows see no key."""
    problem = data.draw(cases(head_size, max_rows=150, max_keys=200)).build()
    count = data.draw(st.sampled_from([1, 1, 2, 5]))
    attention.check(problem, attention.prefill(problem, emulated, count, architecture))


@pytest.mark.parametrize(("head_size", "architecture"), kinds())
@settings(max_examples=10)
@given(st.data())
def test_decode(head_size: int, architecture: int, data: st.DataObject) -> None:
    problem = data.draw(cases(head_size, max_rows=DECODE_ROWS, max_keys=400)).build()
    attention.check(problem, attention.decode(problem, emulated, architecture))


@pytest.mark.parametrize(("head_size", "architecture"), kinds())
@settings(max_examples=10)
@given(st.data())
def test_decode_of_many_rows(head_size: int, architecture: int, data: st.DataObject) -> None:
    case = data.draw(cases(head_size, max_rows=WIDE_ROWS, max_keys=400))
    assume(max(case.q_lens) * case.num_heads // case.num_kv_heads > DECODE_ROWS)
    problem = case.build()
    attention.check(problem, attention.decode(problem, emulated, architecture))


@pytest.mark.parametrize("architecture", [VOLTA, TURING])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_alibi_also_lowers_keys_after_a_token(kind: str, architecture: int) -> None:
    problem = Case((2,) if kind == "decode" else (20,), (40,), 4, 2, dtype=FP16, causal=False, alibi="shared").build()
    compute: Any = attention.prefill if kind == "prefill" else attention.decode
    attention.check(problem, compute(problem, emulated, architecture=architecture))


def slid_out(case: Case) -> AttentionProblem:
    """``case`` after its windows have moved on.

    The pages before each window hold data of other requests, including infinities.
    """
    problem = case.build()
    tokens = torch.diff(problem.query_start_loc).tolist()
    for seq, (new, length) in enumerate(zip(tokens, problem.seq_lens.tolist(), strict=True)):
        unseen = torch.arange(max(0, length - new - case.window[0]))
        if problem.block_table is None:
            assert problem.kv_start_loc is not None
            where: Any = problem.kv_start_loc[seq] + unseen
        else:
            where = problem.block_table[seq, unseen // case.page_size].long(), unseen % case.page_size
        problem.key[where] = problem.value[where] = torch.tensor(math.inf).to(problem.key.dtype)
    return problem


SLID_OUT = {
    "decode": Case((1, 2), (300, 77), 4, 2, dtype=FP16, window=(41, -1)),
    "decode_wide": Case((1, 5), (300, 77), 4, 2, dtype=FP16, window=(41, -1)),
    "prefill": Case((170, 20), (320, 77), 4, 2, dtype=FP16, window=(41, -1), softcap=3.0),
}


@pytest.mark.parametrize("architecture", [VOLTA, TURING])
@pytest.mark.parametrize("page_size", [0, 16, 784])
@pytest.mark.parametrize("kind", SLID_OUT)
def test_pages_that_left_the_window_are_ignored(kind: str, page_size: int, architecture: int) -> None:
    """A weight of 0 would not suffice: infinity times 0 is NaN."""
    problem = slid_out(replace(SLID_OUT[kind], page_size=page_size))
    assert problem.value.isinf().any()
    compute: Any = attention.prefill if kind == "prefill" else attention.decode
    attention.check(problem, compute(problem, emulated, architecture=architecture))


@pytest.mark.parametrize("architecture", [VOLTA, TURING])
@pytest.mark.parametrize("heads", [1, 9])
def test_a_decode_tile_ends_with_its_part(heads: int, architecture: int) -> None:
    """The window begins three keys before the first part ends; the fourth key of its tile belongs to the second."""
    length = volta_kernels.part_length(129, volta_kernels.min_parts(1))
    assert length == 128
    problem = Case((1,), (129,), heads, 1, dtype=FP16, causal=False, window=(3, -1)).build()
    attention.check(problem, attention.decode(problem, emulated, architecture))


def test_prefill_in_parts_after_windows_have_moved() -> None:
    problem = slid_out(SLID_OUT["prefill"])
    attention.check(problem, attention.prefill(problem, emulated, 3))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["prefill", "decode", "decode_wide"])
def test_rows_that_see_no_key_with_sinks_of_minus_infinity(kind: str, count: int) -> None:
    """With fewer keys than queries, the first rows sum over nothing, even with a sink of -inf."""
    lengths = {"decode": (2, 1), "decode_wide": (6, 1), "prefill": (20, 12)}[kind]
    problem = Case(lengths[:1], lengths[1:], 4, 2, dtype=FP16, sinks=-math.inf).build()
    of_prompts = kind == "prefill"
    found = attention.prefill(problem, emulated, count) if of_prompts else attention.decode(problem, emulated)
    assert (found[1][0] == -math.inf).all()
    attention.check(problem, found)


RISES = (0, 3, 6, 9, 12, 40, 43, 80, 79, 60, 40)
"""Scores of the keys of each tile, as exponents of 2. Some rise by less than ``kLag``, some by more."""


def test_references_that_lag_behind_rising_scores() -> None:
    """The rows of every second warp see scores that fall. So the warps of a pair rescale differently."""
    problem = Case((70,), (len(RISES) * 32,), 2, 1, 256, 0, FP16, causal=False).build()
    assert variants.prefill(256).paired
    direction = torch.full((256,), 0.25)
    exponents = torch.tensor(RISES).repeat_interleave(32) + torch.rand(len(RISES) * 32)
    problem.key[: len(exponents), 0] = (exponents[:, None] * math.log(2) / problem.scale / 256 * 4 * direction).half()
    problem.query[:70] = torch.where(torch.arange(70)[:, None, None] % 16 < 8, 4 * direction, -direction).half()
    attention.check(problem, attention.prefill(problem, emulated))


LONG = Case((2,), (8300,), 2, 1, dtype=FP16)
"""A part has more keys than its warps take at a time."""


@pytest.mark.parametrize("architecture", [VOLTA, TURING])
@pytest.mark.parametrize("head_size", [64, more(128), more(256)])
@pytest.mark.parametrize("heads", [2, 12])
def test_decode_of_long_parts(heads: int, head_size: int, architecture: int) -> None:
    variant = variants.decode(head_size, architecture=architecture)
    least = volta_kernels.min_parts(LONG.num_kv_heads)
    assert volta_kernels.part_length(LONG.kv_lens[0], least) > variant.warps * variant.tile
    problem = replace(LONG, num_heads=heads, head_size=head_size).build()
    attention.check(problem, attention.decode(problem, emulated, architecture))


@pytest.mark.parametrize("heads", [4, 18])
def test_decode_of_a_sequence_does_not_depend_on_the_batch(heads: int) -> None:
    """Equal bit for bit: the split into parts and the order of the sums depend only on the sequence itself."""
    problem = Case((1, 1, 2), (700, 2500, 40), heads, 2, dtype=FP16, page_size=16).build()
    assert problem.block_table is not None
    alone = replace(
        problem,
        query=problem.query[:1],
        query_start_loc=problem.query_start_loc[:2],
        seq_lens=problem.seq_lens[:1],
        block_table=problem.block_table[:1],
    )
    together, by_itself = attention.decode(problem, emulated), attention.decode(alone, emulated)
    for batch, one in zip(together, by_itself, strict=True):
        assert torch.equal(batch[:1], one)


@pytest.mark.parametrize("kind", ["prefill", "decode", "decode_wide"])
@pytest.mark.parametrize("head_size", [64, more(192)])
def test_the_simulated_machine_computes_the_same(kind: str, head_size: int) -> None:
    """Equal except for the order in which the tensor cores add, which may change an fp16 weight by one unit."""
    case = Case(
        (2, 1),
        (200, 37),
        12 if kind == "decode_wide" else 4,
        2,
        head_size,
        dtype=FP16,
        window=(150, -1),
        softcap=3.0,
        alibi="shared",
    )
    problem, compute = case.build(), attention.prefill if kind == "prefill" else attention.decode
    (out, lse), (simulated_out, simulated_lse) = compute(problem, emulated), compute(problem, simulated)
    assert float((out.double() - simulated_out.double()).abs().max()) < 5e-4
    torch.testing.assert_close(lse, simulated_lse, rtol=0, atol=1e-5)


BARRIERS = {
    "prefill.cu": ["queries are there", "", "pair: weights are read", "keys are no longer read",
                   "values are no longer read", "keys are no longer read by others",
                   "values are no longer read by others", "", "pair: shares are there", "pair: out is staged",
                   "out is staged"],
    "pair.cuh": ["pair: scores are there", "pair: weights are there"],
    "decode.cu": ["queries are there", "keys are there", "keys are read", "values are there", "values are read",
                  "sums are there"],
    "decode_wide.cu": ["keys are there", "values are there", "queries are read", "means are there"],
}  # fmt: skip
"""The barriers of each source, in order. Those without a name are not needed for correctness: the first one of
prefill is there for the compiler, and the second follows a barrier of the block. Only the V100's kernel for heads of
256 has pairs of warps.
"""


@pytest.mark.parametrize(
    ("source", "number", "architecture"),
    [
        case if case in (("prefill.cu", 3, VOLTA), ("pair.cuh", 1, VOLTA), ("decode.cu", 3, TURING)) else more(*case)
        for source, barriers in BARRIERS.items()
        for number, name in enumerate(barriers)
        for architecture in ((VOLTA,) if name.startswith("pair") else (VOLTA, TURING))
        if name and (case := (source, number, architecture))
    ],
)
def test_every_barrier_is_needed(source: str, number: int, architecture: int, tmp_path: Path) -> None:
    parts = re.split(r"((?:__sync(?:threads|warp)|(?:pair\.)?wait)\(\);)", (SOURCES / source).read_text())
    assert len(parts) == 2 * len(BARRIERS[source]) + 1
    del parts[2 * number + 1]
    kernel = "prefill.cu" if source == "pair.cuh" else source
    (tmp_path / kernel).write_text((SOURCES / kernel).read_text())
    (tmp_path / source).write_text("".join(parts))

    def without_it(variant: variants.Variant) -> Emulation:
        folder = tmp_path if variant.source == kernel else SOURCES
        name = f"sm_{variant.architecture}"
        return Emulation(folder / variant.source, variant.kernel, defines=variant.defines, architecture=name)

    paired = BARRIERS[source][number].startswith("pair")
    problem = {
        "prefill.cu": Case((90,), (300,), 4, 2, 256 if paired else 64, dtype=FP16),
        "decode.cu": LONG,
        "decode_wide.cu": replace(LONG, num_heads=12, window=(290, -1)),  # parts without keys too
    }[kernel].build()
    compute: Any = attention.prefill if kernel == "prefill.cu" else attention.decode
    with pytest.raises(EmulationError, match=r"with no barrier since|has not been written"):
        compute(problem, without_it, architecture=architecture)
