"""A small but complete attention kernel: paged keys and values, causal mask, online softmax, tensor cores."""

from __future__ import annotations

import math

import numpy
import pytest

from kernels.volta.sim import static_bound
from tests.kernels.volta.machine import Array, run

HEAD_SIZE, PAGE = 32, 16

# One warp has 16 queries. The four quadpairs are 2 x 2: two blocks of 8 queries by two blocks of 8 keys. Scores go
# through shared memory to change from the layout of sums to that of factors.
SOURCE = """
#define HEAD 32
#define PAGE 16
#define INFINITY __int_as_float(0x7f800000)
typedef unsigned short half_bits;

__device__ void multiply(float (&d)[8], uint2 a, uint2 b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, "
      "{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a.x), "r"(a.y), "r"(b.x), "r"(b.y));
}
__device__ float widen(half_bits h) { float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h)); return x; }
__device__ float power_of_2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

extern "C" __global__ void __launch_bounds__(32) attend(
    const half_bits* queries, const half_bits* keys, const half_bits* values, const int* block_table, float* out,
    float* lse, int num_queries, int num_keys, float scale_log2) {
  __shared__ __align__(16) float scores[16][PAGE + 1];
  const int lane = threadIdx.x, slot = (lane & 3) + (lane >> 4) * 4, upper = lane >> 4;
  const int row_block = (lane >> 2 & 1) * 8, key_block = (lane >> 3 & 1) * 8;
  const int first = blockIdx.x * 16, own = first + row_block + slot;
  float top = -INFINITY, sum = 0, o[HEAD / 2] = {};  // of query lane / 2, columns of lane % 2
  const int row = lane >> 1, columns = (lane & 1) * (HEAD / 2);

  for (int page = 0; page * PAGE < num_keys; ++page) {
    const long long at = (long long)block_table[page] * PAGE;
    float s[8] = {};
    for (int k = 0; k < HEAD; k += 4) {
      uint2 a = {}, b = {};
      if (own < num_queries) a = *(const uint2*)(queries + own * HEAD + k);
      b = *(const uint2*)(keys + (at + key_block + slot) * HEAD + k);
      multiply(s, a, b);
    }
    for (int e = 0; e < 8; ++e) {
      int r = row_block + (lane & 1) + (e & 2) + 4 * upper, c = key_block + (e & 4) + (lane & 2) + (e & 1);
      int key = page * PAGE + c;
      bool seen = key < num_keys && key <= first + r + num_keys - num_queries;
      scores[r][c] = seen ? s[e] * scale_log2 : -INFINITY;
    }
    __syncwarp();
    float best = top;
    for (int c = 0; c < PAGE; ++c) best = fmaxf(best, scores[row][c]);
    const float reference = best == -INFINITY ? 0 : best, rescale = power_of_2(top - reference);
    sum *= rescale;
    for (int d = 0; d < HEAD / 2; ++d) o[d] *= rescale;
    for (int c = 0; c < PAGE; ++c) {
      float weight = power_of_2(scores[row][c] - reference);
      sum += weight;
      for (int d = 0; d < HEAD / 2; ++d) o[d] += weight * widen(values[(at + c) * HEAD + columns + d]);
    }
    top = best;
    __syncwarp();
  }
  if (first + row < num_queries) {
    for (int d = 0; d < HEAD / 2; ++d) out[(first + row) * HEAD + columns + d] = sum > 0 ? o[d] / sum : 0;
    if (lane % 2 == 0) lse[first + row] = sum > 0 ? (top + log2f(sum)) * 0.69314718f : -INFINITY;
  }
}
"""


def reference(queries: Array, keys: Array, values: Array) -> tuple[Array, Array]:
    """Attention in float64. A query sees the keys up to its own position; both are counted from the end."""
    q, k, v = (array.astype(numpy.float64) for array in (queries, keys, values))
    scores = q @ k.T / math.sqrt(HEAD_SIZE)
    unseen = numpy.arange(len(k)) > numpy.arange(len(q))[:, None] + len(k) - len(q)
    scores[unseen] = -numpy.inf
    with numpy.errstate(divide="ignore", invalid="ignore"):
        lse = numpy.log(numpy.exp(scores).sum(1))
        return numpy.nan_to_num(numpy.exp(scores - lse[:, None])) @ v, lse


@pytest.mark.parametrize(("num_queries", "num_keys"), [(16, 16), (32, 32), (5, 77), (40, 40), (16, 7)])
def test_attention(num_queries: int, num_keys: int) -> None:
    rng = numpy.random.default_rng(0)
    pages = -(-num_keys // PAGE)
    block_table = rng.permutation(pages + 3).astype(numpy.int32)[:pages]
    queries = rng.standard_normal((num_queries, HEAD_SIZE)).astype(numpy.float16)
    cache = rng.standard_normal((2, pages + 3, PAGE, HEAD_SIZE)).astype(numpy.float16)
    keys, values = (part[block_table].reshape(-1, HEAD_SIZE)[:num_keys] for part in cache)
    out, lse = numpy.zeros((num_queries, HEAD_SIZE), numpy.float32), numpy.zeros(num_queries, numpy.float32)
    done = run(
        SOURCE,
        queries,
        numpy.ascontiguousarray(cache[0]),
        numpy.ascontiguousarray(cache[1]),
        block_table,
        out,
        lse,
        numpy.int32(num_queries),
        numpy.int32(num_keys),
        numpy.float32(math.log2(math.e) / math.sqrt(HEAD_SIZE)),
        grid=-(-num_queries // 16),
    )
    expected, expected_lse = reference(queries, keys, values)
    numpy.testing.assert_allclose(out, expected, atol=1e-5)
    numpy.testing.assert_allclose(lse, expected_lse, atol=1e-5)

    executed = zip(done.simulation.instructions, done.traces[0].executions, strict=True)
    products = sum(int(count) for facts, count in executed if "HMMA" in facts.text)
    assert products == 4 * (HEAD_SIZE // 4) * pages
    time = done.simulation.time(done.traces)
    assert time.cycles > max(static_bound(done.simulation, done.traces[0]).values())
    assert 0 < time.pipe_busy["TENSOR"] < time.cycles
