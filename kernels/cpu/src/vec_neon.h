// NEON (AArch64 baseline): 4 lanes, 32 registers.
#include <arm_neon.h>

#include "fp8_format.h"
#include "kernel.h"

namespace fastattention {
namespace {

using Vec = float32x4_t;
constexpr int kWidth = 4;

inline Vec splat(float x) { return vdupq_n_f32(x); }
inline Vec iota(float start) {
  const float lane[4] = {0, 1, 2, 3};
  return vaddq_f32(vdupq_n_f32(start), vld1q_f32(lane));
}
inline Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
inline Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
inline Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
inline Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline Vec max(Vec a, Vec b) { return vmaxq_f32(a, b); }
inline Vec abs(Vec a) { return vabsq_f32(a); }
inline Vec copysign(Vec magnitude, Vec sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude); }
inline Vec select_less(Vec a, Vec b, Vec yes, Vec no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
inline Vec keep_range(Vec x, Vec otherwise, int column, int begin, int end) {
  const int32_t lane_values[4] = {0, 1, 2, 3};
  const int32x4_t lane = vld1q_s32(lane_values);
  const uint32x4_t from = vcgeq_s32(lane, vdupq_n_s32(begin - column));
  return vbslq_f32(vandq_u32(from, vcltq_s32(lane, vdupq_n_s32(end - column))), x, otherwise);
}
// x - floor(x).
inline Vec fraction(Vec x) { return vsubq_f32(x, vrndmq_f32(x)); }
// y * 2^floor(x), or zero where x < bound.
inline Vec times_power_of_two_unless_less(Vec y, Vec x, Vec bound) {
  const int32x4_t biased = vaddq_s32(vcvtmq_s32_f32(x), vdupq_n_s32(127));
  return select_less(x, bound, splat(0.0f), vmulq_f32(y, vreinterpretq_f32_s32(vshlq_n_s32(biased, 23))));
}
inline float first_lane(Vec a) { return vgetq_lane_f32(a, 0); }
inline float reduce_add(Vec a) { return vaddvq_f32(a); }
inline float reduce_max(Vec a) { return vmaxvq_f32(a); }

inline bool any_greater(Vec a, Vec b) { return vmaxvq_u32(vcgtq_f32(a, b)) != 0; }

inline Vec load(const float* p) { return vld1q_f32(p); }
inline Vec load(const Half* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
inline Vec load(const BFloat16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16)); }
// Each of the 4 bytes becomes the upper byte of 16 bits.
inline uint16x4_t load_upper_bytes(const void* p) {
  uint32_t bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
  return vget_low_u16(vshll_n_u8(vcreate_u8(bytes), 8));
}
inline Vec load(const Float8E5M2* p) { return vcvt_f32_f16(vreinterpret_f16_u16(load_upper_bytes(p))); }
// fp8_format.h explains this arithmetic.
inline Vec load(const Float8E4M3* p) {
  const uint16x4_t half = vreinterpret_u16_s16(vshr_n_s16(vreinterpret_s16_u16(load_upper_bytes(p)), 1));
  const uint16x4_t carried = vadd_u16(half, vdup_n_u16(0x80));
  const uint16x4_t bits = veor_u16(half, vand_u16(carried, vdup_n_u16(0x4000)));
  return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(bits)), 256.0f);
}
inline Vec load(const Int8* p) {
  uint32_t bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u64(vcreate_u64(bytes))))));
}
inline void store(float* p, Vec a) { vst1q_f32(p, a); }
inline void store(Half* p, Vec a) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
inline void store(BFloat16* p, Vec a) {
  const uint32x4_t bits = vreinterpretq_u32_f32(a);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  // Rounding could carry a NaN into infinity, so NaNs are made quiet instead.
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  vst1_u16(&p->bits, vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, quiet), 16));
}

template <class T>
inline void store_fp8(T* p, Vec a) {
  using Format = Fp8Format<T>;
  const float32x4_t magnitude = vminq_f32(vdupq_n_f32(Format::kLargest), vabsq_f32(a));
  const uint32x4_t bits = vreinterpretq_u32_f32(magnitude);
  const uint32x4_t last = vandq_u32(vshrq_n_u32(bits, Format::kShift), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(last, vdupq_n_u32(Format::kHalfUnit)));
  const uint32x4_t normal = vsubq_u32(vshrq_n_u32(rounded, Format::kShift), vdupq_n_u32(Format::kRebias));
  const float32x4_t anchor = vdupq_n_f32(Format::kSubnormalAnchor);
  const uint32x4_t subnormal =
      vsubq_u32(vreinterpretq_u32_f32(vaddq_f32(magnitude, anchor)), vreinterpretq_u32_f32(anchor));
  uint32x4_t code = vbslq_u32(vcltq_f32(magnitude, vdupq_n_f32(Format::kSmallestNormal)), subnormal, normal);
  code = vbslq_u32(vceqq_f32(a, a), code, vdupq_n_u32(kFp8NaN));
  code = vorrq_u32(code, vandq_u32(vshrq_n_u32(vreinterpretq_u32_f32(a), 24), vdupq_n_u32(0x80)));
  const uint16x4_t words = vmovn_u32(code);
  const uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0);
  __builtin_memcpy(p, &bytes, sizeof(bytes));
}
inline void store(Float8E4M3* p, Vec a) { store_fp8(p, a); }
inline void store(Float8E5M2* p, Vec a) { store_fp8(p, a); }

inline void store(Int8* p, Vec a) {
  const int16x4_t words = vqmovn_s32(vcvtnq_s32_f32(a));
  const uint32_t bytes = vget_lane_u32(vreinterpret_u32_s8(vqmovn_s16(vcombine_s16(words, words))), 0);
  __builtin_memcpy(p, &bytes, sizeof(bytes));
}

// Lane i of the result is the sum of the lanes of a[i].
inline Vec reduce_add_each(const Vec (&a)[4]) { return vpaddq_f32(vpaddq_f32(a[0], a[1]), vpaddq_f32(a[2], a[3])); }

inline void transpose(Vec (&a)[4]) {
  const float32x4x2_t x = vtrnq_f32(a[0], a[1]);
  const float32x4x2_t y = vtrnq_f32(a[2], a[3]);
  a[0] = vcombine_f32(vget_low_f32(x.val[0]), vget_low_f32(y.val[0]));
  a[1] = vcombine_f32(vget_low_f32(x.val[1]), vget_low_f32(y.val[1]));
  a[2] = vcombine_f32(vget_high_f32(x.val[0]), vget_high_f32(y.val[0]));
  a[3] = vcombine_f32(vget_high_f32(x.val[1]), vget_high_f32(y.val[1]));
}

}  // namespace
}  // namespace fastattention
