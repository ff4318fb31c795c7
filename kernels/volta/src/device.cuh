// Functions that all kernels share.
#ifndef FASTATTENTION_VOLTA_DEVICE_CUH
#define FASTATTENTION_VOLTA_DEVICE_CUH

#include "instructions.cuh"
#include "problem.h"

namespace fastattention {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
FA_DEVICE float infinity() { return __int_as_float(0x7f800000); }

FA_DEVICE float tanh(float x) {  // within 1e-7, which the soft cap multiplies
  return 1.0f - __fdividef(2.0f, exp2(2.0f * kLog2E * x) + 1.0f);
}
template <class T>
FA_DEVICE T of_lane_xor(T x, int mask) {
  return __shfl_xor_sync(~0u, x, mask);
}

FA_DEVICE int divide(int n, const Divisor& by) { return __umulhi(2 * n, by.multiplier) >> by.shift; }

// A tile of fp16 rows in shared memory, in chunks of 16 bytes. Rows are a power of two apart, and a chunk's place in
// its row depends on the row. The eight lanes of a phase then use all banks, both along a row and down a column.
template <int kPitch>
FA_DEVICE int swizzled_chunk(int row, int chunk) {
  return row * kPitch + (chunk ^ (row & 7));
}
// Loads the chunk that is `down` rows below and `right` chunks to the right of a place. `down` is a multiple of 8, and
// the chunk of the place has none of the bits of `right`. The address is in bytes, so that each load costs one
// exclusive or.
template <int kPitch>
FA_DEVICE uint4 load_from(const uint4* tile, int place, int down, int right) {
  const u32 at = (16u * place) ^ (16u * (right & 7));
  return *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(tile) + at +
                                         16 * (down * kPitch + (right & ~7)));
}

}  // namespace fastattention

// Definitions that differ between GPUs: matrix products, and the layouts of their operands and results.
#if __CUDA_ARCH__ >= 750
#include "turing.cuh"
#else
#include "volta.cuh"
#endif

#endif
