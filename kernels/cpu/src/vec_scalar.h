// Portable C++ without intrinsics: runs on every CPU, and is the reference for the vector versions.
#include <math.h>
#include <string.h>

#include "fp8_format.h"
#include "kernel.h"

namespace fastattention {
namespace {

constexpr int kWidth = 4;

struct Vec {
  float lane[kWidth];
};

template <class F>
inline Vec each_lane(F f) {
  Vec result;
  for (int i = 0; i < kWidth; ++i) result.lane[i] = f(i);
  return result;
}

inline Vec splat(float x) {
  return each_lane([&](int) { return x; });
}
inline Vec iota(float start) {
  return each_lane([&](int i) { return start + static_cast<float>(i); });
}
inline Vec add(Vec a, Vec b) {
  return each_lane([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Vec sub(Vec a, Vec b) {
  return each_lane([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline Vec mul(Vec a, Vec b) {
  return each_lane([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Vec div(Vec a, Vec b) {
  return each_lane([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return each_lane([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
}
inline Vec max(Vec a, Vec b) {
  return each_lane([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Vec abs(Vec a) {
  return each_lane([&](int i) { return fabsf(a.lane[i]); });
}
inline Vec copysign(Vec magnitude, Vec sign) {
  return each_lane([&](int i) { return copysignf(magnitude.lane[i], sign.lane[i]); });
}
inline Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return each_lane([&](int i) { return a.lane[i] < b.lane[i] ? yes.lane[i] : no.lane[i]; });
}
inline Vec keep_range(Vec x, Vec otherwise, int column, int begin, int end) {
  return each_lane([&](int i) { return column + i >= begin && column + i < end ? x.lane[i] : otherwise.lane[i]; });
}
// x - floor(x).
inline Vec fraction(Vec x) {
  return each_lane([&](int i) { return x.lane[i] - __builtin_floorf(x.lane[i]); });
}
// y * 2^floor(x), or zero where x < bound.
inline Vec times_power_of_two_unless_less(Vec y, Vec x, Vec bound) {
  const Vec product = each_lane([&](int i) {
    // Out of range, the result is discarded below. Converting such an x would be undefined behaviour.
    const float n = x.lane[i] >= -126.0f && x.lane[i] < 128.0f ? __builtin_floorf(x.lane[i]) : 0.0f;
    const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof(power));
    return y.lane[i] * power;
  });
  return select_less(x, bound, splat(0.0f), product);
}
inline float first_lane(Vec a) { return a.lane[0]; }
inline float reduce_add(Vec a) { return (a.lane[0] + a.lane[2]) + (a.lane[1] + a.lane[3]); }
inline float reduce_max(Vec a) {
  float result = a.lane[0];
  for (int i = 1; i < kWidth; ++i) result = a.lane[i] > result ? a.lane[i] : result;
  return result;
}

inline bool any_greater(Vec a, Vec b) {
  bool any = false;
  for (int i = 0; i < kWidth; ++i) any = any || a.lane[i] > b.lane[i];
  return any;
}

inline float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}
inline uint32_t to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x400) {  // subnormal: magnitude * 2^-24
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    return from_bits(sign | to_bits(value));
  }
  return from_bits(sign | ((magnitude << 13) + (112u << 23)));
}
inline float widen(Float8E5M2 x) { return widen(Half{static_cast<uint16_t>(x.bits << 8)}); }
inline float widen(Float8E4M3 x) {
  const uint16_t sign = static_cast<uint16_t>((x.bits & 0x80) << 8);
  const uint16_t magnitude = x.bits & 0x7f;
  if (magnitude == 0x7f) return widen(Half{static_cast<uint16_t>(sign | 0x7e00)});
  // Read as a Half, the same bits are worth 2^-8 of the number, also for subnormals.
  return widen(Half{static_cast<uint16_t>(sign | magnitude << 7)}) * 256.0f;
}
inline float widen(Int8 x) { return x.value; }
inline void narrow(float x, float* p) { *p = x; }
inline void narrow(float x, BFloat16* p) {
  const uint32_t bits = to_bits(x);
  const bool is_nan = x != x;
  p->bits = static_cast<uint16_t>((is_nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void narrow(float x, Half* p) {
  const uint32_t bits = to_bits(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // 65520 and larger round to infinity
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 rounds to units of 2^-24, ties to even
    half = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
  } else {
    half = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  p->bits = static_cast<uint16_t>(sign | half);
}
template <class T>
inline uint8_t round_fp8(float x) {
  using Format = Fp8Format<T>;
  const uint32_t bits = to_bits(x);
  const float magnitude = from_bits(bits & 0x7fffffff);
  uint32_t code;
  if (x != x) {
    code = kFp8NaN;
  } else if (magnitude >= Format::kLargest) {
    code = Format::kLargestCode;
  } else if (magnitude < Format::kSmallestNormal) {
    code = to_bits(magnitude + Format::kSubnormalAnchor) - to_bits(Format::kSubnormalAnchor);
  } else {
    const uint32_t last = to_bits(magnitude) >> Format::kShift & 1;
    code = ((to_bits(magnitude) + Format::kHalfUnit + last) >> Format::kShift) - Format::kRebias;
  }
  return static_cast<uint8_t>(bits >> 24 & 0x80) | static_cast<uint8_t>(code);
}
inline void narrow(float x, Float8E4M3* p) { p->bits = round_fp8<Float8E4M3>(x); }
inline void narrow(float x, Float8E5M2* p) { p->bits = round_fp8<Float8E5M2>(x); }
inline void narrow(float x, Int8* p) { p->value = static_cast<int8_t>(__builtin_rintf(x)); }
template <class T>
inline Vec load(const T* p) {
  return each_lane([&](int i) { return widen(p[i]); });
}
template <class T>
inline void store(T* p, Vec a) {
  for (int i = 0; i < kWidth; ++i) narrow(a.lane[i], p + i);
}

inline Vec reduce_add_each(const Vec (&a)[kWidth]) {
  return each_lane([&](int i) { return reduce_add(a[i]); });
}
inline void transpose(Vec (&a)[kWidth]) {
  for (int i = 0; i < kWidth; ++i) {
    for (int j = i + 1; j < kWidth; ++j) {
      const float swapped = a[i].lane[j];
      a[i].lane[j] = a[j].lane[i];
      a[j].lane[i] = swapped;
    }
  }
}

}  // namespace
}  // namespace fastattention
