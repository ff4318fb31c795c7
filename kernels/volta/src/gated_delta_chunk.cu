// The gated delta rule, what a chunk needs besides the state before it: for all chunks at once.
//
// With k and q of length 1, c the sum of g up to a token, and L[i][j] = beta[i] (k[i] k[j]) exp(c[i] - c[j]) below the
// diagonal, this computes (1 + L)^-1 times beta of each column, and (q[i] k[j]) exp(c[i] - c[j]) on and below it.
//
// Lengths of keys are at most 1 and beta is at most 1, so no entry of the inverse is above 1. Products of powers of L
// would be, so rows are substituted one after the other, in fp32.
#include "gated_delta.cuh"

namespace fastattention {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr float kEpsilon = 1e-6f;  // of the norm
constexpr int kRow = kTokens + 4;  // floats from row to row of the triangle

// A sum as two numbers, because a chunk's sum can be some thousand, and the difference of two of them small.
struct Sum {
  float high, low;
};
FA_DEVICE Sum add(const Sum& a, const Sum& b) {
  const float high = a.high + b.high, of_b = high - a.high;
  const float lost = (a.high - (high - of_b)) + (b.high - of_b);
  return {high, lost + (a.low + b.low)};
}

FA_DEVICE float square_of_pair(u32 pair) {
  return lower_half(pair) * lower_half(pair) + upper_half(pair) * upper_half(pair);
}

struct OfTokens {
  float high[kTokens], low[kTokens];  // sums of g
  float beta[kTokens];
  float key[kTokens], query[kTokens];  // the inverse of their lengths

  FA_DEVICE float decay(int from, int to) const {
    return exp2(kLog2E * ((high[to] - high[from]) + (low[to] - low[from])));
  }
};

// Loads rows of the used blocks into a tile, zeros behind the end, and the inverse of their lengths.
FA_DEVICE void load(uint4* tile, float* inverse, const void* from, int stride, int head, int first, int rows, int used,
                    bool normalise) {
  const int chunk = threadIdx.x % kChunks;
  const uint4* const source = static_cast<const uint4*>(from) + head * kChunks + chunk;
#pragma unroll 4
  for (int row = threadIdx.x / kChunks; row < 16 * used; row += kThreads / kChunks) {
    const uint4 x = row < rows ? source[static_cast<size_t>(first + row) * (stride / 8)] : make_uint4(0, 0, 0, 0);
    tile[swizzled_chunk<kChunks>(row, chunk)] = x;
    float sum = square_of_pair(x.x) + square_of_pair(x.y) + square_of_pair(x.z) + square_of_pair(x.w);
    FA_UNROLL
    for (int mask = 1; mask < kChunks; mask *= 2) sum += of_lane_xor(sum, mask);
    if (chunk == 0) inverse[row] = normalise ? rsqrtf(sum + kEpsilon) : 1.0f;
  }
}

// Sums of g by the first warp; a lane has two tokens.
FA_DEVICE void sum_decays(OfTokens& tokens, const GatedDelta& p, int head, int first, int rows) {
  const int lane = threadIdx.x;
  float g[2];
  FA_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    const size_t at = static_cast<size_t>(first + row) * p.value_heads + head;
    // Without a decay and an addition, a token behind the end has no effect.
    g[i] = row < rows ? p.g[at] : 0.0f;
    tokens.beta[row] = row < rows ? p.beta[at] : 0.0f;
  }
  Sum sum = add(Sum{g[0], 0.0f}, Sum{g[1], 0.0f});
  FA_UNROLL
  for (int apart = 1; apart < 32; apart *= 2) {
    const int from = (lane - apart) & 31;
    const Sum earlier{__shfl_sync(~0u, sum.high, from), __shfl_sync(~0u, sum.low, from)};
    if (lane >= apart) sum = add(earlier, sum);
  }
  Sum before{__shfl_sync(~0u, sum.high, (lane - 1) & 31), __shfl_sync(~0u, sum.low, (lane - 1) & 31)};
  if (lane == 0) before = {0.0f, 0.0f};
  const Sum own = add(before, Sum{g[0], 0.0f});
  tokens.high[2 * lane] = own.high, tokens.low[2 * lane] = own.low;
  tokens.high[2 * lane + 1] = sum.high, tokens.low[2 * lane + 1] = sum.low;
}

// products[j] = 16 rows times the keys of block j, for the blocks on and below the diagonal.
FA_DEVICE void multiply_rows(float (&products)[kBlocks][8], const uint4* rows, const uint4* keys, const Lane& lane,
                             int block) {
  FA_UNROLL
  for (int j = 0; j < kBlocks; ++j) {
    FA_UNROLL
    for (int e = 0; e < 8; ++e) products[j][e] = 0.0f;
  }
#pragma unroll 2
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    Operand row[1], key[1];
    load_queries<kChunks>(row, rows, lane, 16 * block, chunk);
    FA_UNROLL
    for (int j = 0; j < kBlocks; ++j) {
      if (j > block) continue;
      load_keys<kChunks>(key, keys, lane, 16 * j, chunk);
      multiply_by_columns(products[j], row[0].x, row[0].y, key[0].x, key[0].y);
      multiply_by_columns(products[j], row[0].z, row[0].w, key[0].z, key[0].w);
    }
  }
}

// One column of the inverse, by one thread. What is above the diagonal of `triangle` is L, transposed; the column goes
// to its place on and below it.
FA_DEVICE void invert(float* triangle, int column, int used) {
#pragma unroll 1
  for (int block = 0; block < used; ++block) {
    float x[16];
    FA_UNROLL
    for (int i = 0; i < 16; ++i) x[i] = 16 * block + i == column ? 1.0f : 0.0f;
#pragma unroll 4
    for (int row = 0; row < 16 * block; ++row) {
      const float known = row >= column ? triangle[row * kRow + column] : 0.0f;
      const float4* const l = reinterpret_cast<const float4*>(triangle + row * kRow + 16 * block);
      FA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float4 four = l[i];
        x[4 * i] -= four.x * known, x[4 * i + 1] -= four.y * known;
        x[4 * i + 2] -= four.z * known, x[4 * i + 3] -= four.w * known;
      }
    }
    FA_UNROLL
    for (int row = 0; row < 16; ++row) {
      const float* const l = triangle + (16 * block + row) * kRow + 16 * block;
      FA_UNROLL
      for (int i = row + 1; i < 16; ++i) x[i] -= l[i] * x[row];
    }
    FA_UNROLL
    for (int i = 0; i < 16; ++i) {
      const int row = 16 * block + i;
      if (row >= column) triangle[row * kRow + column] = x[i];
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) fa_volta_gated_delta_chunk(const GatedDelta p) {
  extern __shared__ uint4 shared[];
  uint4 *const keys = shared, *const queries = shared + kTokens * kChunks;
  OfTokens& tokens = *reinterpret_cast<OfTokens*>(shared + 2 * kTokens * kChunks);
  float* const triangle = reinterpret_cast<float*>(shared);  // after the products
  const int head = blockIdx.x, key_head = head / (p.value_heads / p.key_heads), number = blockIdx.y;
  const int first = p.chunks[2 * number], rows = p.chunks[2 * number + 1] - first;
  const int used = used_blocks(rows);  // nothing is written for the others
  const int warp = threadIdx.x / 32;
  const Lane lane(threadIdx.x & 31);

  load(keys, tokens.key, p.k, p.k_stride, key_head, first, rows, used, p.normalise);
  load(queries, tokens.query, p.q, p.q_stride, key_head, first, rows, used, p.normalise);
  if (warp == 0) sum_decays(tokens, p, head, first, rows);
  __syncthreads();

  const size_t place = of_chunk(p, number, head);
  uint4* const matrices = static_cast<uint4*>(p.matrices) + place * kMatrices * kMatrix;
  float* const factors = p.factors + place * kFactors;
  if (threadIdx.x < 16 * used) {
    const int token = threadIdx.x;
    const float key = tokens.key[token], grown = exp2(kLog2E * (tokens.high[token] + tokens.low[token]));
    // Keys are multiplied by a power of 2, which is exact, so that their length is between 1/2 and 1.
    const float power = __int_as_float(__float_as_int(key) & 0x7f800000), rest = __fdividef(key, power);
    factors[kSeen * kTokens + token] = grown * rest;
    factors[kAsked * kTokens + token] = grown * tokens.query[token];
    factors[kKept * kTokens + token] = tokens.decay(token, kTokens - 1) * rest;
    factors[kPower * kTokens + token] = power;
    if (token == 16 * used - 1) factors[kDecay] = grown;
  }

  float products[kBlocks][8];
  if (warp < used) multiply_rows(products, queries, keys, lane, warp);
  FA_UNROLL
  for (int j = 0; j < kBlocks; ++j) {
    if (j > warp || warp >= used) continue;
    FA_UNROLL
    for (int e = 0; e < 8; e += 2) {
      const int i = 16 * warp + lane.row() + kRowStep * (e >> 1 & 1);
      const int column = 16 * j + lane.column() + kColumnStep * (e >> 2);
      float weights[2];
      FA_UNROLL
      for (int d = 0; d < 2; ++d) {
        const float product = products[j][e + d] * tokens.query[i] * tokens.key[column + d];
        weights[d] = column + d <= i ? product * tokens.decay(column + d, i) : 0.0f;
      }
      u32* const row = reinterpret_cast<u32*>(matrices + kWeights * kMatrix + i * kMatrixChunks);
      row[column / 2] = pack(weights[0], weights[1]);
    }
  }
  if (warp < used) multiply_rows(products, keys, keys, lane, warp);
  __syncthreads();
  FA_UNROLL
  for (int j = 0; j < kBlocks; ++j) {
    if (j > warp || warp >= used) continue;
    FA_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int i = 16 * warp + lane.row() + kRowStep * (e >> 1 & 1);
      const int column = 16 * j + lane.column() + kColumnStep * (e >> 2) + (e & 1);
      if (column >= i) continue;
      const float product = products[j][e] * tokens.key[i] * tokens.key[column];
      triangle[column * kRow + i] = tokens.beta[i] * product * tokens.decay(column, i);
    }
  }
  __syncthreads();
  if (threadIdx.x < 16 * used) invert(triangle, threadIdx.x, used);
  __syncthreads();

  for (int at = threadIdx.x; at < 16 * used * kMatrixChunks; at += kThreads) {
    const int row = at / kMatrixChunks, column = at % kMatrixChunks * 8;
    u32 upper[4], lower[4];
    FA_UNROLL
    for (int i = 0; i < 4; ++i) {
      float x[2];
      FA_UNROLL
      for (int d = 0; d < 2; ++d) {
        const int j = column + 2 * i + d;
        x[d] = j <= row ? triangle[row * kRow + j] * tokens.beta[j] : 0.0f;
      }
      split(upper[i], lower[i], x[0], x[1]);
    }
    matrices[kUpper * kMatrix + at] = make_uint4(upper[0], upper[1], upper[2], upper[3]);
    matrices[kLower * kMatrix + at] = make_uint4(lower[0], lower[1], lower[2], lower[3]);
  }
}

}  // namespace fastattention
