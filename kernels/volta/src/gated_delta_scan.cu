// The gated delta rule over the chunks of a request, one after the other, with the matrices of gated_delta_chunk.cu.
//
// The state is in registers throughout, transposed: a warp has 16 values and all 128 keys of it, so that warps never
// exchange anything. With S before a chunk, all for one value:
//
//   r[i] = v[i] - exp(c[i]) k[i] S                     what the tokens would add
//   d[i] = sum over j of inverse[i][j] r[j]            what they add, because each sees what those before have added
//   out[i] = exp(c[i]) q[i] S + sum of weights[i][j] d[j]
//   S = exp(c[last]) S + sum over i of exp(c[last] - c[i]) k[i] d[i]
//
// Tensor cores take fp16. q, k and v are; S, r, d and the inverse are split in two fp16 numbers each, which together
// have 22 bits, so that the state loses nothing from chunk to chunk that fp32 would keep. Only d in the output and the
// weights are rounded to fp16, as the output is.
#include "gated_delta.cuh"

#ifndef WARPS
#define WARPS 8
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 1
#endif

namespace fastattention {

constexpr int kThreads = 32 * WARPS;
constexpr int kValueChunks = 2 * WARPS;         // of this CTA
constexpr int kAtOnce = WARPS / 2;              // loads of keys and queries: more would spill registers
constexpr int kOutputs = output_blocks(kSize);  // of 16 keys
constexpr float kScale = 0.08838834764831845f;  // of queries: 128^-0.5

// A 16 x 16 block as an operand, in two parts. volta.cuh has the layouts.
struct TwoParts {
  u32 upper[4], lower[4];

  FA_DEVICE TwoParts() {}
  FA_DEVICE TwoParts(const float (&x)[8], const Lane& lane) {
    FA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int e = 2 * (i & 1) + 4 * (i >> 1);
      split(upper[i], lower[i], x[e], x[e + 1]);
    }
    to_operand(upper, lane);
    to_operand(lower, lane);
  }
  FA_DEVICE void of_other_quadpair() {
    FA_UNROLL
    for (int i = 0; i < 4; ++i) upper[i] = of_lane_xor(upper[i], 8), lower[i] = of_lane_xor(lower[i], 8);
  }
};

template <int kUsed>
FA_DEVICE void clear(float (&sums)[kUsed][8]) {
  FA_UNROLL
  for (int b = 0; b < kUsed; ++b) {
    FA_UNROLL
    for (int e = 0; e < 8; ++e) sums[b][e] = 0.0f;
  }
}

FA_DEVICE void multiply_by_chunk(float (&sums)[8], const u32 (&low)[4], const u32 (&high)[4], int h, const uint4& x) {
  multiply_by_columns(sums, low[2 * h], low[2 * h + 1], x.x, x.y);
  multiply_by_columns(sums, high[2 * h], high[2 * h + 1], x.z, x.w);
}

// The state times keys and queries: [16 values, 16 tokens of kUsed blocks] each.
template <int kUsed>
FA_DEVICE void multiply_by_tokens(float (&by_keys)[kUsed][8], float (&by_queries)[kUsed][8],
                                  const float (&state)[kOutputs][8], const uint4* keys, const uint4* queries,
                                  const Lane& lane) {
  FA_UNROLL
  for (int t = 0; t < kOutputs / 2; ++t) {  // 32 keys' numbers
    TwoParts low(state[2 * t], lane), high(state[2 * t + 1], lane);
    FA_UNROLL
    for (int of_other = 0; of_other < 2; ++of_other) {
      if (of_other) low.of_other_quadpair(), high.of_other_quadpair();
      const int place = swizzled_chunk<kChunks>(8 * lane.across + lane.slot, 2 * (lane.across ^ of_other));
      FA_UNROLL
      for (int h = 0; h < 2; ++h) {
        FA_UNROLL
        for (int b = 0; b < kUsed; ++b) {
          const uint4 k = load_from<kChunks>(keys, place, 16 * b, 4 * t + h);
          multiply_by_chunk(by_keys[b], low.upper, high.upper, h, k);
          multiply_by_chunk(by_keys[b], low.lower, high.lower, h, k);
        }
        FA_UNROLL
        for (int b = 0; b < kUsed; ++b) {
          const uint4 q = load_from<kChunks>(queries, place, 16 * b, 4 * t + h);
          multiply_by_chunk(by_queries[b], low.upper, high.upper, h, q);
          multiply_by_chunk(by_queries[b], low.lower, high.lower, h, q);
        }
      }
    }
  }
}

// sums[i] += sum over j of x[j] times entry [i][j] of a matrix, which has nothing above the diagonal. kBoth: with the
// matrix's lower part and that of x.
template <bool kBoth, int kUsed>
FA_DEVICE void multiply_by_matrix(float (&sums)[kUsed][8], const TwoParts (&x)[kUsed], const uint4* matrix,
                                  const uint4* lower, const Lane& lane) {
  FA_UNROLL
  for (int j = 0; j < kUsed; ++j) {
    TwoParts own = x[j];
    FA_UNROLL
    for (int of_other = 0; of_other < 2; ++of_other) {
      if (of_other) own.of_other_quadpair();
      const int place = swizzled_chunk<kMatrixChunks>(8 * lane.across + lane.slot, lane.across ^ of_other);
      FA_UNROLL
      for (int b = j; b < kUsed; ++b) {
        const uint4 m = load_from<kMatrixChunks>(matrix, place, 16 * b, 2 * j);
        multiply_by_columns(sums[b], own.upper[0], own.upper[1], m.x, m.y);
        multiply_by_columns(sums[b], own.upper[2], own.upper[3], m.z, m.w);
        if (!kBoth) continue;
        multiply_by_columns(sums[b], own.lower[0], own.lower[1], m.x, m.y);
        multiply_by_columns(sums[b], own.lower[2], own.lower[3], m.z, m.w);
        const uint4 rest = load_from<kMatrixChunks>(lower, place, 16 * b, 2 * j);
        multiply_by_columns(sums[b], own.upper[0], own.upper[1], rest.x, rest.y);
        multiply_by_columns(sums[b], own.upper[2], own.upper[3], rest.z, rest.w);
      }
    }
  }
}

// state += changes times keys.
template <int kUsed>
FA_DEVICE void add_changes(float (&state)[kOutputs][8], const TwoParts (&changes)[kUsed], const uint4* keys,
                           const Lane& lane) {
  FA_UNROLL
  for (int j = 0; j < kUsed; ++j) {
    TwoParts own = changes[j];
    FA_UNROLL
    for (int of_other = 0; of_other < 2; ++of_other) {
      if (of_other) own.of_other_quadpair();
      FA_UNROLL
      for (int k = 0; k < 2; ++k) {
        const int token = 8 * (lane.across ^ of_other) + 4 * k + (lane.index & 3);
        const int at = swizzled_chunk<kChunks>(token, 2 * lane.across + lane.half);
        FA_UNROLL
        for (int t = 0; t < kOutputs / 2; ++t) {
          const uint4 x = load_from<kChunks>(keys, at, 16 * j, 4 * t);
          multiply_by_rows(state[2 * t], own.upper[2 * k], own.upper[2 * k + 1], x.x, x.y);
          multiply_by_rows(state[2 * t + 1], own.upper[2 * k], own.upper[2 * k + 1], x.z, x.w);
          multiply_by_rows(state[2 * t], own.lower[2 * k], own.lower[2 * k + 1], x.x, x.y);
          multiply_by_rows(state[2 * t + 1], own.lower[2 * k], own.lower[2 * k + 1], x.z, x.w);
        }
      }
    }
  }
}

// The place of element e of block b of a [values, tokens] result in a tile of [tokens, values], in fp16 numbers.
FA_DEVICE int place_of(const Lane& lane, int warp, int b, int e) {
  const int token = 16 * b + lane.column() + kColumnStep * (e >> 2) + (e & 1);
  const int value = 16 * warp + lane.row() + kRowStep * (e >> 1 & 1);
  return 8 * swizzled_chunk<kValueChunks>(token, value >> 3) + (value & 7);
}
FA_DEVICE float of_token(const float* factors, const Lane& lane, int b, int e) {
  return factors[16 * b + lane.column() + kColumnStep * (e >> 2) + (e & 1)];
}

// A lane has two neighbouring keys of each block. Lanes that differ in bit 1 exchange some, so that a lane reads and
// writes four neighbours, and two lanes a sector. `from` and `to`: of the lane's first row.
FA_DEVICE void load_state(float (&state)[kOutputs][8], const float* from, const Lane& lane) {
  FA_UNROLL
  for (int t = 0; t < kOutputs; t += 2) {
    FA_UNROLL
    for (int e = 0; e < 8; e += 2) {
      const int at = kRowStep * (e >> 1 & 1) * kSize + 8 * lane.output_chunk(t, e >> 2) + 4 * lane.bit1;
      const float4 x = *reinterpret_cast<const float4*>(from + at);
      const float a = of_lane_xor(lane.bit1 ? x.x : x.z, 2), b = of_lane_xor(lane.bit1 ? x.y : x.w, 2);
      state[t][e] = lane.bit1 ? a : x.x, state[t][e + 1] = lane.bit1 ? b : x.y;
      state[t + 1][e] = lane.bit1 ? x.z : a, state[t + 1][e + 1] = lane.bit1 ? x.w : b;
    }
  }
}
FA_DEVICE void store_state(float* to, const float (&state)[kOutputs][8], const Lane& lane) {
  FA_UNROLL
  for (int t = 0; t < kOutputs; t += 2) {
    FA_UNROLL
    for (int e = 0; e < 8; e += 2) {
      const int at = kRowStep * (e >> 1 & 1) * kSize + 8 * lane.output_chunk(t, e >> 2) + 4 * lane.bit1;
      const float a = of_lane_xor(lane.bit1 ? state[t][e] : state[t + 1][e], 2);
      const float b = of_lane_xor(lane.bit1 ? state[t][e + 1] : state[t + 1][e + 1], 2);
      *reinterpret_cast<float4*>(to + at) = lane.bit1 ? make_float4(a, b, state[t + 1][e], state[t + 1][e + 1])
                                                      : make_float4(state[t][e], state[t][e + 1], a, b);
    }
  }
}

struct Tiles {
  uint4 *keys, *queries, *values, *matrices;
  float* factors;
};

// One chunk of up to 16 * kUsed rows.
template <int kUsed>
FA_DEVICE void step(float (&state)[kOutputs][8], const GatedDelta& p, const Tiles& tiles, const Lane& lane, int head,
                    int slice, int first, int rows, size_t place) {
  constexpr int kRows = 16 * kUsed;
  uint4 *const keys = tiles.keys, *const queries = tiles.queries, *const values = tiles.values,
               *const matrices = tiles.matrices;
  float* const factors = tiles.factors;
  const int key_head = head / (p.value_heads / p.key_heads), warp = threadIdx.x / 32;
  const float* const given = p.factors + place * kFactors;
  const uint4* const k = static_cast<const uint4*>(p.k) + key_head * kChunks;
  const uint4* const q = static_cast<const uint4*>(p.q) + key_head * kChunks;
  const uint4* const v = static_cast<const uint4*>(p.v) + head * kChunks + slice * kValueChunks;
  const uint4* const m = static_cast<const uint4*>(p.matrices) + place * kMatrices * kMatrix;
  const uint4 nothing = make_uint4(0, 0, 0, 0);
#pragma unroll kAtOnce
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, at = i % kChunks;
    const size_t token = first + row;
    uint4 x = row < rows ? k[token * (p.k_stride / 8) + at] : nothing;
    const u32 power = pack(given[kPower * kTokens + row], given[kPower * kTokens + row]);
    x = make_uint4(multiply_halves(x.x, power), multiply_halves(x.y, power), multiply_halves(x.z, power),
                   multiply_halves(x.w, power));
    keys[swizzled_chunk<kChunks>(row, at)] = x;
    queries[swizzled_chunk<kChunks>(row, at)] = row < rows ? q[token * (p.q_stride / 8) + at] : nothing;
  }
#pragma unroll 4
  for (int i = threadIdx.x; i < kRows * kValueChunks; i += kThreads) {
    const int row = i / kValueChunks, at = i % kValueChunks;
    const size_t token = first + row;
    values[swizzled_chunk<kValueChunks>(row, at)] = row < rows ? v[token * (p.v_stride / 8) + at] : nothing;
  }
#pragma unroll 4
  for (int i = threadIdx.x; i < kMatrices * kRows * kMatrixChunks; i += kThreads) {
    const int matrix = i / (kRows * kMatrixChunks), of_matrix = i % (kRows * kMatrixChunks);
    const int row = matrix * kTokens + of_matrix / kMatrixChunks, at = i % kMatrixChunks;
    matrices[swizzled_chunk<kMatrixChunks>(row, at)] = m[row * kMatrixChunks + at];
  }
  for (int i = threadIdx.x; i < kFactors; i += kThreads) factors[i] = given[i];
  __syncthreads();

  float changes[kUsed][8], output[kUsed][8];
  clear(changes);
  clear(output);
  multiply_by_tokens(changes, output, state, keys, queries, lane);
  TwoParts operands[kUsed];
  const Half* const read = reinterpret_cast<const Half*>(values);
  FA_UNROLL
  for (int b = 0; b < kUsed; ++b) {
    FA_UNROLL
    for (int e = 0; e < 8; ++e) {
      changes[b][e] =
          to_float(read[place_of(lane, warp, b, e)]) - of_token(factors + kSeen * kTokens, lane, b, e) * changes[b][e];
      output[b][e] *= of_token(factors + kAsked * kTokens, lane, b, e);
    }
    operands[b] = TwoParts(changes[b], lane);
  }
  clear(changes);
  multiply_by_matrix<true>(changes, operands, matrices + kUpper * kMatrix, matrices + kLower * kMatrix, lane);
  FA_UNROLL
  for (int b = 0; b < kUsed; ++b) operands[b] = TwoParts(changes[b], lane);
  multiply_by_matrix<false>(output, operands, matrices + kWeights * kMatrix, nullptr, lane);
  FA_UNROLL
  for (int b = 0; b < kUsed; ++b) {
    FA_UNROLL
    for (int e = 0; e < 8; ++e) changes[b][e] *= of_token(factors + kKept * kTokens, lane, b, e);
    operands[b] = TwoParts(changes[b], lane);
  }
  const float decay = factors[kDecay];
  FA_UNROLL
  for (int t = 0; t < kOutputs; ++t) {
    FA_UNROLL
    for (int e = 0; e < 8; ++e) state[t][e] *= decay;
  }
  add_changes(state, operands, keys, lane);

  // A lane writes its output where only it has read values.
  Half* const write = reinterpret_cast<Half*>(values);
  FA_UNROLL
  for (int b = 0; b < kUsed; ++b) {
    FA_UNROLL
    for (int e = 0; e < 8; ++e) write[place_of(lane, warp, b, e)] = to_half(kScale * output[b][e]);
  }
  __syncthreads();
  // The next step fills these tiles without waiting: a thread overwrites values that it reads here itself, and all
  // have read the other tiles.
  uint4* const out = static_cast<uint4*>(p.out) + head * kChunks + slice * kValueChunks;
#pragma unroll 4
  for (int i = threadIdx.x; i < rows * kValueChunks; i += kThreads) {
    const int row = i / kValueChunks, at = i % kValueChunks;
    out[static_cast<size_t>(first + row) * (p.out_stride / 8) + at] = values[swizzled_chunk<kValueChunks>(row, at)];
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM) fa_volta_gated_delta_scan(const GatedDelta p) {
  extern __shared__ uint4 shared[];
  Tiles tiles;
  tiles.keys = shared;
  tiles.queries = tiles.keys + kTokens * kChunks;
  tiles.values = tiles.queries + kTokens * kChunks;
  tiles.matrices = tiles.values + kTokens * kValueChunks;
  tiles.factors = reinterpret_cast<float*>(tiles.matrices + kMatrices * kMatrix);
  constexpr int kSlices = kSize / (16 * WARPS);  // CTAs that share a head
  const int head = blockIdx.x / kSlices, slice = blockIdx.x % kSlices;
  const int* const piece = p.pieces + 4 * blockIdx.y;
  const int begin = piece[0], end = piece[1], first_chunk = piece[2], request = piece[3];
  const int warp = threadIdx.x / 32;
  const Lane lane(threadIdx.x & 31);

  float state[kOutputs][8];
  const size_t own = (static_cast<size_t>(request) * p.value_heads + head) * kSize * kSize +
                     (16 * (warp + WARPS * slice) + lane.row()) * kSize;
  load_state(state, p.before + own, lane);

#pragma unroll 1
  for (int first = begin, chunk = first_chunk; first < end; first += kTokens, ++chunk) {
    const int rows = min(kTokens, end - first);
    const size_t place = of_chunk(p, chunk, head);
    if (used_blocks(rows) > 1) {
      step<kBlocks>(state, p, tiles, lane, head, slice, first, rows, place);
    } else {
      step<1>(state, p, tiles, lane, head, slice, first, rows, place);
    }
  }

  store_state(p.after + own, state, lane);
}

}  // namespace fastattention
