// Matrix products of sm_75: m16n8k8 of the whole warp, with operands loaded by ldmatrix. volta.cuh defines the same
// names and explains them.
#ifndef FASTATTENTION_VOLTA_TURING_CUH
#define FASTATTENTION_VOLTA_TURING_CUH

#include "device.cuh"

namespace fastattention {

constexpr int kRowStep = 8, kColumnStep = 8;

// In a block of 8 x 8 numbers, lane 4 r + c holds row r, columns 2 c and 2 c + 1. A block of 16 x 16 is four of them.
struct Lane {
  int index;
  FA_DEVICE explicit Lane(int lane) : index(lane) {}

  FA_DEVICE int row() const { return index >> 2; }
  FA_DEVICE int column() const { return 2 * (index & 3); }
  FA_DEVICE bool is_first_of_row() const { return (index & 3) == 0; }
  FA_DEVICE int output_chunk(int t, int h) const { return 2 * t + h; }
  FA_DEVICE int output_column(int) const { return 2 * (index & 3); }
};

FA_DEVICE float max_of_row(float x) {
  x = fmaxf(x, of_lane_xor(x, 1));
  return fmaxf(x, of_lane_xor(x, 2));
}
FA_DEVICE float sum_of_row(float x) {
  x += of_lane_xor(x, 1);
  return x + of_lane_xor(x, 2);
}

// --- scores: queries times keys -------------------------------------------------------------------------------------

// One chunk of rows 0 to 7 and of rows 8 to 15.
struct Operand {
  u32 low, high;
};
constexpr int kKeysAtOnce = 2;

// Loads one chunk of 32 rows. Each lane supplies the address of one row.
template <int kPitch>
FA_DEVICE void load_rows(Operand& first, Operand& second, const uint4* tile, const Lane& lane, int row, int chunk) {
  u32 matrices[4];
  load_matrices(matrices, tile, swizzled_chunk<kPitch>(row + lane.index, 0), chunk);
  first = {matrices[0], matrices[1]};
  second = {matrices[2], matrices[3]};
}
template <int kPitch, int kBlocks>
FA_DEVICE void load_queries(Operand (&to)[kBlocks], const uint4* tile, const Lane& lane, int first_row, int chunk) {
  if constexpr (kBlocks == 1) {
    u32 matrices[2];
    load_matrices(matrices, tile, swizzled_chunk<kPitch>(first_row + (lane.index & 15), 0), chunk);
    to[0] = {matrices[0], matrices[1]};
  } else {
    static_assert(kBlocks == 2, "32 rows at once");
    load_rows<kPitch>(to[0], to[1], tile, lane, first_row, chunk);
  }
}
template <int kPitch>
FA_DEVICE void load_keys(Operand (&to)[kKeysAtOnce], const uint4* tile, const Lane& lane, int first_key, int chunk) {
  load_rows<kPitch>(to[0], to[1], tile, lane, first_key, chunk);
}
template <int kBlocks, int kColumns>
FA_DEVICE void multiply_by_keys(float (&scores)[kBlocks][kColumns][8], int j, const Operand (&q)[kBlocks],
                                const Operand& k) {
  FA_UNROLL
  for (int i = 0; i < kBlocks; ++i) multiply_16x8(scores[i][j], q[i].low, q[i].high, k.low);
  FA_UNROLL
  for (int i = 0; i < kBlocks; ++i) multiply_16x8(scores[i][j] + 4, q[i].low, q[i].high, k.high);
}

// --- output: weights times values -----------------------------------------------------------------------------------

constexpr int output_blocks(int head_size) { return (head_size + 15) / 16; }

// On sm_75 a result has the layout of an operand.
FA_DEVICE void to_operand(u32 (&)[4], const Lane&) {}

template <int kPitch, int kBlocks, int kColumns, int kOutputs>
FA_DEVICE void multiply_by_values(float (&output)[kBlocks][kOutputs][8], const u32 (&weights)[kBlocks][kColumns][4],
                                  int j, const uint4* values, const Lane& lane, int first_key) {
  FA_UNROLL
  for (int t = 0; t < kOutputs; ++t) {
    u32 v[4];  // keys 0 to 7 and 8 to 15 of columns 0 to 7, then the same of columns 8 to 15
    load_transposed_matrices(v, values, swizzled_chunk<kPitch>(first_key + (lane.index & 15), lane.index >> 4), 2 * t);
    FA_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      const u32(&w)[4] = weights[i][j];
      multiply_16x8(output[i][t], w[0], w[1], v[0]);
      multiply_16x8(output[i][t] + 4, w[0], w[1], v[2]);
    }
    FA_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      const u32(&w)[4] = weights[i][j];
      multiply_16x8(output[i][t], w[2], w[3], v[1]);
      multiply_16x8(output[i][t] + 4, w[2], w[3], v[3]);
    }
  }
}

// --- eight rows and 32 keys -----------------------------------------------------------------------------------------

// Chunks from row to row for DecodeLane, a power of two because the addresses of chunks are exclusive ors.
constexpr int decode_pitch(int chunks) { return chunks <= 8 ? 8 : chunks <= 16 ? 16 : 32; }

// Everything is transposed here, so that the eight rows are the narrow side of a product: scores are keys times
// queries, and the output's columns are values times weights. Addresses are computed for each load in any case.
template <int kHeadSize, int kPitch, bool kComputed = true>
struct DecodeLane : Lane {
  static constexpr int kOutputs = kHeadSize / 16, kElements = 4;
  using Lane::Lane;

  FA_DEVICE int row(int r) const { return 2 * (index & 3) + r; }
  FA_DEVICE int key(int e) const { return (index >> 2) + 8 * e; }
  static constexpr FA_DEVICE int score(int r, int e) { return r + 2 * e; }
  static constexpr FA_DEVICE int row_of(int e) { return e & 1; }
  FA_DEVICE int column(int t, int e) const { return 16 * t + (index >> 2) + 8 * (e >> 1); }

  FA_DEVICE void multiply_by_keys(float (&scores)[8], const uint4* queries, const uint4* keys) const {
    FA_UNROLL
    for (int c = 0; c < kHeadSize / 8; c += 2) {
      u32 q[2];
      load_matrices(q, queries, swizzled_chunk<kPitch>(index & 7, index >> 3 & 1), c);
      FA_UNROLL
      for (int also = 0; also < 2; ++also) {
        u32 k[4];
        load_matrices(k, keys, swizzled_chunk<kPitch>(index, 0), c + also);
        multiply_16x8(scores, k[0], k[1], q[also]);
        multiply_16x8(scores + 4, k[2], k[3], q[also]);
      }
    }
  }

  FA_DEVICE float max_of_row(float x) const {
    FA_UNROLL
    for (int mask = 4; mask < 32; mask *= 2) x = fmaxf(x, of_lane_xor(x, mask));
    return x;
  }

  FA_DEVICE void to_operand(u32 (&packed)[4], const float (&weights)[2][4]) const {
    FA_UNROLL
    for (int e = 0; e < 4; ++e) packed[e] = transpose_matrix(pack(weights[0][e], weights[1][e]));
  }

  FA_DEVICE void multiply_by_values(float (&output)[kOutputs][kElements], const u32 (&weights)[4],
                                    const uint4* values) const {
    FA_UNROLL
    for (int t = 0; t < kOutputs; ++t) {
      FA_UNROLL
      for (int e = 0; e < 4; e += 2) {
        u32 v[4];  // columns 0 to 7 and 8 to 15 of keys 0 to 7, then the same of keys 8 to 15
        const int key = 8 * e + 8 * (index >> 4) + (index & 7);
        load_transposed_matrices(v, values, swizzled_chunk<kPitch>(key, index >> 3 & 1), 2 * t);
        multiply_16x8(output[t], v[0], v[1], weights[e]);
        multiply_16x8(output[t], v[2], v[3], weights[e + 1]);
      }
    }
  }

  FA_DEVICE float sum_of_row(float x) const {
    FA_UNROLL
    for (int mask = 4; mask < 32; mask *= 2) x += of_lane_xor(x, mask);
    return x;
  }
  FA_DEVICE bool has_output(int) const { return true; }
  FA_DEVICE bool is_first_of_row() const { return index < 4; }
};

}  // namespace fastattention

#endif
