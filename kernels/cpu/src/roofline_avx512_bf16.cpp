#include <immintrin.h>

#include "roofline.h"

namespace fastattention {
namespace {

constexpr int kAccumulators = 12;
#define FA_ACCUMULATORS _Pragma("GCC unroll 12")

float dot_loop(int64_t iterations) {
  __m512 sums[kAccumulators];
  FA_ACCUMULATORS for (int a = 0; a < kAccumulators; ++a) {
    sums[a] = _mm512_setzero_ps();
    asm volatile("" : "+v"(sums[a]));  // otherwise the compiler would see that all are equal and keep one
  }
  __m512i x = _mm512_set1_epi16(0x3a80), y = x;  // 2^-10
  for (int64_t i = 0; i < iterations; ++i) {
    asm volatile("" : "+v"(x), "+v"(y));
    FA_ACCUMULATORS for (int a = 0; a < kAccumulators; ++a) {
      sums[a] = _mm512_dpbf16_ps(sums[a], (__m512bh)x, (__m512bh)y);
    }
  }
  for (int a = 1; a < kAccumulators; ++a) sums[0] = _mm512_add_ps(sums[0], sums[a]);
  return sums[0][0];
}

}  // namespace

extern const PeakLoop kDotAvx512Bf16;
const PeakLoop kDotAvx512Bf16 = {"bf16_dot", kAccumulators * 32 * 2, dot_loop};

}  // namespace fastattention
