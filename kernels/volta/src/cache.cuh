// The formats of the KV cache. Converts eight stored numbers to fp16 on their way to shared memory, and eight fp16
// numbers to the stored format. GPUs before sm_89 have no instructions for 8-bit numbers.
#ifndef FASTATTENTION_VOLTA_CACHE_CUH
#define FASTATTENTION_VOLTA_CACHE_CUH

#include "device.cuh"

#define FP16 0
#define E5M2 1
#define E4M3 2  // has no infinities; 0x7f and 0xff are NaN
#define INT8 3
#ifndef KV_CACHE
#define KV_CACHE FP16
#endif

namespace fastattention {

#if KV_CACHE == FP16

using Stored = Half;
using Eight = uint4;
FA_DEVICE Eight eight_zeros() { return make_uint4(0, 0, 0, 0); }
FA_DEVICE uint4 to_halves(const Eight& stored) { return stored; }
FA_DEVICE Eight to_stored(const uint4& halves, float) { return halves; }

#else

using Stored = unsigned char;
using Eight = uint2;
FA_DEVICE Eight eight_zeros() { return make_uint2(0, 0); }

// Four stored numbers.
FA_DEVICE void to_halves(u32 four, u32& low, u32& high) {
#if KV_CACHE == E5M2  // the upper half of an fp16 number
  low = __byte_perm(four, 0, 0x1404);
  high = __byte_perm(four, 0, 0x3424);
#elif KV_CACHE == E4M3
  // Exponent and mantissa move down by one bit. This multiplies every number by 2^-8, subnormal ones too; the problem's
  // scales contain the factor 2^8. A number that becomes 0x80 when 1 is added is NaN, and gets fp16's highest exponent
  // bit.
  const u32 sizes = four & 0x7f7f7f7f;
  const u32 nan = (sizes + 0x01010101) >> 1 & 0x40404040;
  const u32 upper = (((sizes >> 1 & 0x3f3f3f3f) | nan) & 0x7f7f7f7f) | (four & 0x80808080);
  const u32 lower = four << 7 & 0x80808080;
  low = __byte_perm(lower, upper, 0x5140);
  high = __byte_perm(lower, upper, 0x7362);
#else  // 0x6400 is 1024; its last bits are the stored number plus 128
  const u32 shifted = four ^ 0x80808080;
  low = add_halves(__byte_perm(shifted, 0x64646464, 0x4140), 0xe480e480);
  high = add_halves(__byte_perm(shifted, 0x64646464, 0x4342), 0xe480e480);
#endif
}
FA_DEVICE uint4 to_halves(const Eight& stored) {
  u32 halves[4];
  to_halves(stored.x, halves[0], halves[1]);
  to_halves(stored.y, halves[2], halves[3]);
  return make_uint4(halves[0], halves[1], halves[2], halves[3]);
}

// Rounds to the nearest number, ties to even. Numbers that are too large, and infinities, become the largest number.
// NaN stays NaN; as an integer, it becomes 0.
FA_DEVICE u32 to_stored(float x) {
#if KV_CACHE == INT8
  return static_cast<u32>(max(-128, min(127, round_to_int(x)))) & 0xff;
#else
  constexpr int kMantissa = KV_CACHE == E5M2 ? 2 : 3, kBias = KV_CACHE == E5M2 ? 15 : 7, kDropped = 23 - kMantissa;
  const u32 bits = __float_as_int(x), sign = bits >> 24 & 0x80;
  u32 size = bits & 0x7fffffff;
  if (size > 0x7f800000) return sign | 0x7f;
  size = min(static_cast<int>(size), KV_CACHE == E5M2 ? 0x47600000 : 0x43e00000);  // 57344, 448
  if (size < (128u - kBias) << 23) {  // subnormal: the number of smallest steps
    const int unit = (127 + 24 - kBias - kMantissa) << 23;
    return sign | (__float_as_int(__int_as_float(size) + __int_as_float(unit)) - unit);
  }
  const u32 rounded = size + (1u << (kDropped - 1)) - 1 + (size >> kDropped & 1);
  return sign | ((rounded >> kDropped) - ((127 - kBias) << kMantissa));
#endif
}
FA_DEVICE Eight to_stored(const uint4& halves, float scale) {
  const u32 pairs[4] = {halves.x, halves.y, halves.z, halves.w};
  u32 stored[2] = {0, 0};
  FA_UNROLL
  for (int i = 0; i < 8; ++i) {
    stored[i / 4] |= to_stored(to_float(static_cast<Half>(pairs[i / 2] >> 16 * (i & 1))) / scale) << 8 * (i & 3);
  }
  return make_uint2(stored[0], stored[1]);
}

#endif  // KV_CACHE

}  // namespace fastattention

#endif
