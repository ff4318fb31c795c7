// fp8 and fp32, the arithmetic behind load and store of every vec_<isa>.h.
//
// Widening goes through fp16, whose conversion to fp32 is one instruction and makes nothing of subnormals. e5m2 is the
// upper byte of an fp16. e4m3 there, one bit further down, has its fields where fp16 has them, and is 2^-8 of what it
// should be. That shift, an arithmetic one, leaves the sign in the exponent's top bit as well. Adding one to the last
// place of e4m3 carries into that bit from 0x7f, the NaN, alone: the sum's bit, exclusive-or the sign, is what belongs
// there, and a set one makes the NaN an fp16 NaN.
//
// Rounding is to nearest, ties to even. What lies beyond the largest finite number becomes that number, infinity
// included, and NaN stays NaN: __NV_SATFINITE of vLLM's CUDA kernels, for both formats. (torch's own conversion does so
// for e4m3 in newer versions only, and lets e5m2 overflow to infinity.)
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
  // From kSmallestNormal on: bits of fp32 that go, half of the last that stays less one, and the exponents' difference.
  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr uint32_t kHalfUnit = (1u << (kShift - 1)) - 1;
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << kMantissaBits;
};

template <>
struct Fp8Format<Float8E4M3> : Fp8Rounding<3, 7> {
  static constexpr float kLargest = 448.0f;
  static constexpr uint32_t kLargestCode = 0x7e;
  static constexpr float kSmallestNormal = 0.015625f;  // 2^-6
  // An fp32 number of this size has the unit of the subnormals, 2^-9, as its last bit: adding it rounds to that unit.
  static constexpr float kSubnormalAnchor = 16384.0f;
};

template <>
struct Fp8Format<Float8E5M2> : Fp8Rounding<2, 15> {
  static constexpr float kLargest = 57344.0f;
  static constexpr uint32_t kLargestCode = 0x7b;
  static constexpr float kSmallestNormal = 6.103515625e-5f;  // 2^-14
  static constexpr float kSubnormalAnchor = 128.0f;          // last bit 2^-16
};

}  // namespace
}  // namespace fastattention

#endif
