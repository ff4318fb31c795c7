// The formats of quantised weights. Converts a lane's share of a unit (linear.h) to operands of products.
#ifndef FASTATTENTION_VOLTA_WEIGHTS_CUH
#define FASTATTENTION_VOLTA_WEIGHTS_CUH

#include "instructions.cuh"
#include "linear.h"

#define INT4 0
#define INT8 1
#define E4M3 2
#ifndef WEIGHT
#define WEIGHT INT4
#endif

namespace fastattention {

// A lane's four words hold its k in order, eight of them in a word (4 bits) or four (8 bits). Within a word, k comes in
// an order that takes few instructions to convert: {0, 2, 4, 6, 1, 3, 5, 7} from the lowest bits (4 bits), {0, 1, 2, 3}
// (int8), {0, 2, 1, 3} (e4m3).
constexpr int kPairs = WEIGHT == INT4 ? 4 : 2;    // of fp16 numbers in a word
constexpr int kUnit = WEIGHT == INT4 ? 128 : 64;  // k of a unit

#if WEIGHT == E4M3

// The factor of the results of a group, with the 2^8 that to_operands leaves out.
using Scale = float;
FA_DEVICE Scale no_scale() { return 0.0f; }
FA_DEVICE float factor_of(Scale scale) { return scale; }  // that to_operands leaves to the results

// Exponent and mantissa move down by one bit. That multiplies each number by 2^-8, subnormal ones too.
FA_DEVICE void to_operands(u32 (&pairs)[kPairs], u32 word, Scale) {
  pairs[0] = (word << 7 & 0x3f803f80) | (word << 8 & 0x80008000);
  pairs[1] = (word >> 1 & 0x3f803f80) | (word & 0x80008000);
}

#else

// The scale of a column and group in fp16, and above it -(1024 + zero point). A weight is scale * (number - zero
// point), rounded to fp16.
using Scale = u32;
FA_DEVICE Scale no_scale() { return 0; }
FA_DEVICE float factor_of(Scale) { return 1.0f; }

FA_DEVICE void to_operands(u32 (&pairs)[kPairs], u32 word, Scale of) {
  const u32 scale = __byte_perm(of, 0, 0x1010), minus = __byte_perm(of, 0, 0x3232);
#if WEIGHT == INT4
  // 0x6400 is 1024. Its last bits are the number, or 16 times the number; 0xd400 is -64.
  const u32 minus_of_upper = (minus << 4 & 0x00f000f0) | 0xd400d400, upper = word >> 8;
  pairs[0] = add_halves(and_or(word, 0x000f000f, 0x64006400), minus);
  pairs[1] = multiply_add_halves(and_or(word, 0x00f000f0, 0x64006400), 0x2c002c00, minus_of_upper);
  pairs[2] = add_halves(and_or(upper, 0x000f000f, 0x64006400), minus);
  pairs[3] = multiply_add_halves(and_or(upper, 0x00f000f0, 0x64006400), 0x2c002c00, minus_of_upper);
#else
  pairs[0] = add_halves(__byte_perm(word, 0x64646464, 0x4140), minus);
  pairs[1] = add_halves(__byte_perm(word, 0x64646464, 0x4342), minus);
#endif
  FA_UNROLL
  for (int i = 0; i < kPairs; ++i) pairs[i] = multiply_halves(pairs[i], scale);
}

#endif

// The work of a lane: its column of a tile, and its quarter of a unit's k.
struct WeightLane {
  int index, slot, quadpair;
  FA_DEVICE explicit WeightLane(int lane) : index(lane), slot((lane & 3) | lane >> 4 << 2), quadpair(lane >> 2 & 3) {}

  FA_DEVICE const uint4* packed(const Weights& w, int tile) const {  // of unit 0; the next unit is 32 further
    return static_cast<const uint4*>(w.packed) + static_cast<size_t>(tile) * w.units * 32 + index;
  }
  FA_DEVICE Scale scale(const Weights& w, int tile, int unit) const {
    const int group = min((4 * unit + quadpair) >> w.group_shift, w.groups - 1);
    const int column = WEIGHT == E4M3 ? tile >> w.scale_shift : 8 * tile + slot;
    return static_cast<const Scale*>(w.scales)[group * w.scale_stride + column];
  }
};

}  // namespace fastattention

#endif
