// Matrix products of sm_70: m8n8k4 of four quadpairs at a time, arranged 2 x 2 over 16 x 16 results. turing.cuh defines
// the same names.
#ifndef FASTATTENTION_VOLTA_VOLTA_CUH
#define FASTATTENTION_VOLTA_VOLTA_CUH

#include "device.cuh"

namespace fastattention {

// A lane holds eight elements of a 16 x 16 result. Element e is kRowStep * (e >> 1 & 1) rows below the first element
// and kColumnStep * (e >> 2) + (e & 1) columns to the right of it.
constexpr int kRowStep = 2, kColumnStep = 4;

// A quadpair is the lanes 4q to 4q + 3 and 4q + 16 to 4q + 19.
struct Lane {
  int index, slot;       // slot: the lane's number, 0 to 7, in its quadpair
  int across, down;      // the quadpair's place in the 2 x 2 arrangement over 16 columns and 16 rows
  int bit0, bit1, half;  // bits 0, 1 and 4 of the index
  FA_DEVICE explicit Lane(int lane)
      : index(lane),
        slot((lane & 3) | (lane >> 4) << 2),
        across(lane >> 3 & 1),
        down(lane >> 2 & 1),
        bit0(lane & 1),
        bit1(lane >> 1 & 1),
        half(lane >> 4) {}

  // Row and column of the lane's first element of a 16 x 16 result.
  FA_DEVICE int row() const { return 8 * half + 4 * down + bit0; }
  FA_DEVICE int column() const { return 8 * across + 2 * bit1; }
  // True for one of the lanes that share a row.
  FA_DEVICE bool is_first_of_row() const { return bit1 == 0 && across == 0; }
  // The chunk of 8 columns, and the first column in it, of elements 4 h to 4 h + 3 of output block t.
  FA_DEVICE int output_chunk(int t, int h) const { return 4 * (t >> 1) + 2 * across + h; }
  FA_DEVICE int output_column(int t) const { return 4 * (t & 1) + 2 * bit1; }
};

// Reductions over the lanes that share a row.
FA_DEVICE float max_of_row(float x) {
  x = fmaxf(x, of_lane_xor(x, 2));
  return fmaxf(x, of_lane_xor(x, 8));
}
FA_DEVICE float sum_of_row(float x) {
  x += of_lane_xor(x, 2);
  return x + of_lane_xor(x, 8);
}

// --- scores: queries times keys -------------------------------------------------------------------------------------

// A lane's part of 16 rows and one chunk: a row of its quadpair. The other quadpair along the 16 columns holds the same
// rows.
using Operand = uint4;
constexpr int kKeysAtOnce = 1;  // blocks of 16 keys that are loaded together

template <int kPitch, int kBlocks>
FA_DEVICE void load_queries(Operand (&to)[kBlocks], const uint4* tile, const Lane& lane, int first_row, int chunk) {
  // The rows of each phase differ modulo 8, so that it uses all banks.
  FA_UNROLL
  for (int i = 0; i < kBlocks; ++i) {
    to[i] = load_from<kPitch>(
        tile, swizzled_chunk<kPitch>(first_row + 8 * lane.half + 4 * lane.down + (lane.index & 3), 0), 16 * i, chunk);
  }
}
template <int kPitch>
FA_DEVICE void load_keys(Operand (&to)[kKeysAtOnce], const uint4* tile, const Lane& lane, int first_key, int chunk) {
  to[0] = load_from<kPitch>(tile, swizzled_chunk<kPitch>(8 * lane.across + lane.slot, 0), first_key, chunk);
}
// scores[i][j] += q[i] * k
template <int kBlocks, int kColumns>
FA_DEVICE void multiply_by_keys(float (&scores)[kBlocks][kColumns][8], int j, const Operand (&q)[kBlocks],
                                const Operand& k) {
  FA_UNROLL
  for (int i = 0; i < kBlocks; ++i) multiply_by_columns(scores[i][j], q[i].x, q[i].y, k.x, k.y);
  FA_UNROLL
  for (int i = 0; i < kBlocks; ++i) multiply_by_columns(scores[i][j], q[i].z, q[i].w, k.z, k.w);
}

// --- output: weights times values -----------------------------------------------------------------------------------

// Blocks of 16 columns for a head.
constexpr int output_blocks(int head_size) { return 2 * ((head_size + 31) / 32); }

// Converts packed weights of 16 x 16 from the layout of a result to that of an operand. Elements 2 r + 4 h and the next
// are packed in weights[r + 2 h]. Lanes that differ in bit 1 exchange half of their weights.
FA_DEVICE void to_operand(u32 (&weights)[4], const Lane& lane) {
  FA_UNROLL
  for (int g = 0; g < 4; g += 2) {
    const u32 give = lane.bit1 ? weights[g] : weights[g + 1];
    const u32 got = of_lane_xor(give, 2);
    if (lane.bit1) {
      weights[g] = got;
    } else {
      weights[g + 1] = got;
    }
  }
}

// output[i] += weights[i][j] * the 16 values from first_key on. Each quadpair holds the weights of 8 of the 16 keys,
// and its neighbour across holds those of the other 8. Of every kStep chunks, four are multiplied, from first_chunk on.
template <int kPitch, int kStep = 4, int kBlocks, int kColumns, int kOutputs>
FA_DEVICE void multiply_by_values(float (&output)[kBlocks][kOutputs][8], const u32 (&weights)[kBlocks][kColumns][4],
                                  int j, const uint4* values, const Lane& lane, int first_key, int first_chunk = 0) {
  FA_UNROLL
  for (int of_other = 0; of_other < 2; ++of_other) {
    u32 w[kBlocks][4];
    FA_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      FA_UNROLL
      for (int g = 0; g < 4; ++g) w[i][g] = of_other ? of_lane_xor(weights[i][j][g], 8) : weights[i][j][g];
    }
    FA_UNROLL
    for (int k = 0; k < 2; ++k) {
      const int key = 8 * (lane.across ^ of_other) + 4 * k + (lane.index & 3);
      const int at = swizzled_chunk<kPitch>(key, 2 * lane.across + lane.half + first_chunk);
      FA_UNROLL
      for (int t = 0; t < kOutputs / 2; ++t) {
        const uint4 v = load_from<kPitch>(values, at, first_key, kStep * t);
        FA_UNROLL
        for (int i = 0; i < kBlocks; ++i) multiply_by_rows(output[i][2 * t], w[i][2 * k], w[i][2 * k + 1], v.x, v.y);
        FA_UNROLL
        for (int i = 0; i < kBlocks; ++i) {
          multiply_by_rows(output[i][2 * t + 1], w[i][2 * k], w[i][2 * k + 1], v.z, v.w);
        }
      }
    }
  }
}

// --- eight rows and 32 keys -----------------------------------------------------------------------------------------

// Chunks from row to row for DecodeLane, a multiple of the eight that are swizzled.
constexpr int decode_pitch(int chunks) { return chunks <= 8 ? 8 : chunks <= 16 ? 16 : (chunks + 7) / 8 * 8; }

// The four quadpairs of a warp compute the scores of 8 keys each; a lane holds those of two rows and four keys. Each
// quadpair takes a quarter of the output's columns, because all columns of a large head would not fit its registers, so
// they exchange weights. If the head has no multiple of 64 columns, some quadpairs also multiply the zeros after it.
// The compiler keeps the addresses of all chunks in registers, unless kComputed asks for one computation per load.
template <int kHeadSize, int kPitch, bool kComputed = false>
struct DecodeLane : Lane {
  static constexpr int kColumns = (kHeadSize + 15) / 16;  // blocks of 16 columns in a head
  static constexpr int kOwnColumns = (kColumns + 3) / 4;
  static constexpr int kOutputs = 2 * kOwnColumns,
                       kElements = 8;  // products of the output, and a lane's elements of one
  static_assert(8 * kOwnColumns <= kPitch, "rows of the tile have zeros after the head");

  int quadpair;
  int own_keys;  // first of 4 keys, with 4 more from 16 keys further on: the eight rows of a phase differ modulo 8
  FA_DEVICE explicit DecodeLane(int lane)
      : Lane(lane), quadpair(down + 2 * across), own_keys(4 * (quadpair & 1) + 8 * (quadpair >> 1)) {}

  FA_DEVICE int row(int r) const { return bit0 + 2 * r + 4 * half; }
  FA_DEVICE int key(int e) const { return 2 * bit1 + (e & 1) + own_keys + 16 * (e >> 1); }
  static constexpr FA_DEVICE int score(int r, int e) { return (e & 1) + 2 * r + 4 * (e >> 1); }
  // Row and column of an element of the output.
  static constexpr FA_DEVICE int row_of(int e) { return e >> 1 & 1; }
  FA_DEVICE int column(int t, int e) const {
    return 8 * (2 * (4 * (t >> 1) + quadpair) + (e >> 2)) + 4 * (t & 1) + 2 * bit1 + (e & 1);
  }

  FA_DEVICE void multiply_by_keys(float (&scores)[8], const uint4* queries, const uint4* keys) const {
    FA_UNROLL
    for (int c = 0; c < kHeadSize / 8; ++c) {
      const int key = (index & 3) + own_keys + 16 * half;
      const uint4 q = kComputed ? load_from<kPitch>(queries, swizzled_chunk<kPitch>(slot, 0), 0, c)
                                : queries[swizzled_chunk<kPitch>(slot, c)];
      const uint4 k = kComputed ? load_from<kPitch>(keys, swizzled_chunk<kPitch>(key, 0), 0, c)
                                : keys[swizzled_chunk<kPitch>(key, c)];
      multiply_by_columns(scores, q.x, q.y, k.x, k.y);
      multiply_by_columns(scores, q.z, q.w, k.z, k.w);
    }
  }

  FA_DEVICE float max_of_row(float x) const {
    FA_UNROLL
    for (int mask = 2; mask < 16; mask *= 2) x = fmaxf(x, of_lane_xor(x, mask));
    return x;
  }

  FA_DEVICE void to_operand(u32 (&packed)[4], const float (&weights)[2][4]) const {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      packed[r] = pack(weights[r][0], weights[r][1]);
      packed[2 + r] = pack(weights[r][2], weights[r][3]);
    }
    fastattention::to_operand(packed, *this);
  }

  FA_DEVICE void multiply_by_values(float (&output)[kOutputs][kElements], const u32 (&weights)[4],
                                    const uint4* values) const {
    FA_UNROLL
    for (int of = 0; of < 4; ++of) {  // the keys of this quadpair, then those of the others
      const int their_keys = 4 * ((quadpair ^ of) & 1) + 8 * ((quadpair ^ of) >> 1);
      FA_UNROLL
      for (int k = 0; k < 2; ++k) {
        const u32 w0 = of == 0 ? weights[2 * k] : of_lane_xor(weights[2 * k], 4 * of);
        const u32 w1 = of == 0 ? weights[2 * k + 1] : of_lane_xor(weights[2 * k + 1], 4 * of);
        FA_UNROLL
        for (int t = 0; t < kOwnColumns; ++t) {
          const int chunk = 2 * (4 * t + quadpair) + half;
          const uint4 v = values[swizzled_chunk<kPitch>(their_keys + (index & 3) + 16 * k, chunk)];
          multiply_by_rows(output[2 * t], w0, w1, v.x, v.y);
          multiply_by_rows(output[2 * t + 1], w0, w1, v.z, v.w);
        }
      }
    }
  }

  FA_DEVICE float sum_of_row(float x) const {
    FA_UNROLL
    for (int mask = 2; mask < 16; mask *= 2) x += of_lane_xor(x, mask);
    return x;
  }
  // Whether output block t lies within the head.
  FA_DEVICE bool has_output(int t) const { return kColumns % 4 == 0 || 4 * (t >> 1) + quadpair < kColumns; }
  FA_DEVICE bool is_first_of_row() const { return quadpair == 0 && bit1 == 0; }
};

}  // namespace fastattention

#endif
