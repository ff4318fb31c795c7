// Conversion between fp8 and fp32, used by load and store of every vec_<isa>.h.
//
// Widening goes through fp16, because fp16 converts to fp32 in one instruction, subnormals included. e5m2 is the upper
// byte of an fp16. For e4m3 that byte is shifted right by one bit, which puts its fields where fp16 has them and makes
// the number 2^-8 of its value. The shift is arithmetic and also copies the sign into the top bit of the exponent,
// where it must be removed again. NaN (0x7f) is the only e4m3 magnitude for which adding one to the last place carries
// into that bit. So the bit of the sum, exclusive-or the sign, is the correct top bit: set for NaN, which makes it an
// fp16 NaN, and clear for all other numbers.
//
// Rounding is to nearest, ties to even. Numbers beyond the largest finite number, including infinity, become that
// number, and NaN stays NaN. Both formats follow __NV_SATFINITE of vLLM's CUDA kernels. (torch's own conversion
// saturates e4m3 in newer versions only, and lets e5m2 overflow to infinity.)
#ifndef FASTATTENTION_FP8_FORMAT_H
#define FASTATTENTION_FP8_FORMAT_H

#include "kernel.h"

namespace fastattention {
namespace {

constexpr uint32_t kFp8NaN = 0x7f;

template <class T>
struct Fp8Format;

template <int kMantissaBits, int kBias>
struct Fp8Rounding {
  // For magnitudes from kSmallestNormal on: the number of dropped fp32 bits, half a unit of the last kept bit less one,
  // and the difference of the exponent biases.
  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr uint32_t kHalfUnit = (1u << (kShift - 1)) - 1;
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << kMantissaBits;
};

template <>
struct Fp8Format<Float8E4M3> : Fp8Rounding<3, 7> {
  static constexpr float kLargest = 448.0f;
  static constexpr uint32_t kLargestCode = 0x7e;
  static constexpr uint32_t kInfinityCode = 0;         // has none
  static constexpr float kSmallestNormal = 0.015625f;  // 2^-6
  // In an fp32 number of this size the last bit is worth 2^-9, the unit of the subnormals. Adding it rounds to that
  // unit.
  static constexpr float kSubnormalAnchor = 16384.0f;
};

template <>
struct Fp8Format<Float8E5M2> : Fp8Rounding<2, 15> {
  static constexpr float kLargest = 57344.0f;
  static constexpr uint32_t kLargestCode = 0x7b;
  static constexpr uint32_t kInfinityCode = 0x7c;
  static constexpr float kSmallestNormal = 6.103515625e-5f;  // 2^-14
  static constexpr float kSubnormalAnchor = 128.0f;          // last bit 2^-16
};

}  // namespace
}  // namespace fastattention

#endif
