// Prefill with large heads on Volta: two neighbouring warps share 32 rows, and each has half of the columns.
//
// Each multiplies all 32 rows by its half of the keys' columns for the scores, and by its half of the values' columns
// for the output. So what it loads from shared memory serves 32 rows, although the output of 32 rows and all columns
// would not fit its registers. In between, each warp has 16 of the rows ("its own"; block 0 of scores, weights and
// output, and block 1 is the partner's). It gets the other half of their scores' sums from its partner, and gives it
// their weights.
//
// Queries, keys and values fill all of shared memory. So they exchange through the rows of the values' tile that the
// two fill afterwards.
#ifndef FASTATTENTION_VOLTA_PAIR_CUH
#define FASTATTENTION_VOLTA_PAIR_CUH

#include "device.cuh"

#ifndef PAIRED  // 1: prefill uses it
#define PAIRED 0
#endif

namespace fastattention {

// How much a row's scores, in units of the exponent of 2, may exceed the reference that is subtracted from them. While
// they do not, neither the output nor the sum needs to be rescaled. Weights are at most 2^kLag.
constexpr float kLag = 8.0f;

// Two numbers from 0 to 65504 in fp16, rounded to nearest; ties go up. NaN becomes 0, but it is also in the row's sum,
// which makes the whole row NaN at the end.
// pack() would wait for the unit that converts, which also computes exponentials. The factor 2^-112 turns the exponent
// of fp32 into that of fp16, also below its normal numbers. Then the bits of fp16 begin at bit 13, of which 12 is the
// last that is rounded.
FA_DEVICE u32 pack_weights(float a, float b) {
  const auto bits = [](float x) {
    return 8 * static_cast<u32>(__float_as_int(multiply(x, 1.925929944e-34f))) + 0x8000;
  };
  return __byte_perm(bits(a), bits(b), 0x7632);
}

template <int kPitch, int kWarps>
struct Pair {
  static constexpr int kApart = kWarps * kPitch;  // chunks between two rows of a tile that a warp fills
  int warp;
  int first_chunk;  // this warp has four of every eight chunks, from this one on
  // This lane's places in the rows that this warp fills and in those that its partner fills.
  uint4 *ours, *theirs;

  FA_DEVICE Pair(uint4* values, int warp, int lane)
      : warp(warp),
        first_chunk(4 * (warp & 1)),
        ours(values + warp * kPitch + lane),
        theirs(values + (warp ^ 1) * kPitch + lane) {}

  FA_DEVICE void wait() const { wait_for_pair(1 + warp / 2); }

  FA_DEVICE int first_row(int block) const { return 16 * (warp ^ block); }
  static constexpr FA_DEVICE int chunk(int number) { return 8 * (number >> 2) + (number & 3); }

  // Like the functions of the same name in volta.cuh, for the warp's chunk of this number.
  template <int kBlocks, class Lane>
  FA_DEVICE void load_queries(Operand (&to)[kBlocks], const uint4* tile, const Lane& lane, int number) const {
    FA_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      const int row = first_row(i) + 8 * lane.half + 4 * lane.down + (lane.index & 3);
      to[i] = load_from<kPitch>(tile, swizzled_chunk<kPitch>(row, first_chunk), 0, chunk(number));
    }
  }
  template <class Lane>
  FA_DEVICE void load_keys(Operand (&to)[kKeysAtOnce], const uint4* tile, const Lane& lane, int first_key,
                           int number) const {
    const int key = 8 * lane.across + lane.slot;
    to[0] = load_from<kPitch>(tile, swizzled_chunk<kPitch>(key, first_chunk), first_key, chunk(number));
  }
  template <int kBlocks, int kColumns, int kOutputs, class Lane>
  FA_DEVICE void multiply_by_values(float (&output)[kBlocks][kOutputs][8], const u32 (&weights)[kBlocks][kColumns][4],
                                    int j, const uint4* values, const Lane& lane, int first_key) const {
    fastattention::multiply_by_values<kPitch, 8>(output, weights, j, values, lane, first_key, first_chunk);
  }
  template <class Lane>
  FA_DEVICE int output_chunk(const Lane& lane, int t, int h) const {
    return 8 * (t >> 1) + first_chunk + 2 * lane.across + h;
  }

  // Completes the scores of the warp's own rows.
  template <int kBlocks, int kColumns>
  FA_DEVICE void complete(float (&scores)[kBlocks][kColumns][8]) const {
    static_assert(2 * kColumns * kWarps <= 16 * kColumns, "the scores of half of the rows fit in the values' tile");
    FA_UNROLL
    for (int i = 0; i < 2 * kColumns; ++i) {
      const float* const x = scores[1][i >> 1] + 4 * (i & 1);
      ours[i * kApart] =
          make_uint4(__float_as_int(x[0]), __float_as_int(x[1]), __float_as_int(x[2]), __float_as_int(x[3]));
    }
    wait();
    FA_UNROLL
    for (int i = 0; i < 2 * kColumns; ++i) {
      float* const x = scores[0][i >> 1] + 4 * (i & 1);
      const uint4 more = theirs[i * kApart];
      x[0] += __int_as_float(more.x), x[1] += __int_as_float(more.y);
      x[2] += __int_as_float(more.z), x[3] += __int_as_float(more.w);
    }
  }

  // Exchanges the weights of the own rows, and the factors for their earlier output. It writes without waiting, where
  // only this lane has read.
  template <int kBlocks, int kColumns>
  FA_DEVICE void exchange(u32 (&weights)[kBlocks][kColumns][4], float (&factors)[kBlocks][2]) const {
    FA_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      const u32(&w)[4] = weights[0][j];
      theirs[j * kApart] = make_uint4(w[0], w[1], w[2], w[3]);
    }
    *reinterpret_cast<uint2*>(theirs + kColumns * kApart) =
        make_uint2(__float_as_int(factors[0][0]), __float_as_int(factors[0][1]));
    wait();
    FA_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      const uint4 w = ours[j * kApart];
      weights[1][j][0] = w.x, weights[1][j][1] = w.y, weights[1][j][2] = w.z, weights[1][j][3] = w.w;
    }
    const uint2 two = *reinterpret_cast<const uint2*>(ours + kColumns * kApart);
    factors[1][0] = __int_as_float(two.x), factors[1][1] = __int_as_float(two.y);
  }
};

}  // namespace fastattention

#endif
