// What the kernels are made of.
#ifndef FASTATTENTION_VOLTA_DEVICE_CUH
#define FASTATTENTION_VOLTA_DEVICE_CUH

#include "instructions.cuh"
#include "problem.h"

namespace fastattention {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
FA_DEVICE float infinity() { return __int_as_float(0x7f800000); }

FA_DEVICE float tanh(float x) {  // to 1e-7, which a soft cap multiplies
  return 1.0f - __fdividef(2.0f, exp2(2.0f * kLog2E * x) + 1.0f);
}
template <class T>
FA_DEVICE T of_lane_xor(T x, int mask) {
  return __shfl_xor_sync(~0u, x, mask);
}

FA_DEVICE int divide(int n, const Divisor& by) { return __umulhi(2 * n, by.multiplier) >> by.shift; }

// A tile of rows of fp16 in shared memory, in chunks of 16 bytes. Rows lie a power of two apart, and a chunk's place in
// its row depends on the row: the eight lanes of a phase then meet all banks whether they go along a row or down a
// column.
template <int kPitch>
FA_DEVICE int swizzled_chunk(int row, int chunk) {
  return row * kPitch + (chunk ^ (row & 7));
}
// What lies `down` rows, a multiple of 8, and `right` chunks from a place whose own chunk has none of the bits of
// `right`. In bytes, so that one exclusive or is all that each load costs beside itself.
template <int kPitch>
FA_DEVICE uint4 load_from(const uint4* tile, int place, int down, int right) {
  const u32 at = (16u * place) ^ (16u * (right & 7));
  return *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(tile) + at +
                                         16 * (down * kPitch + (right & ~7)));
}

}  // namespace fastattention

// What differs between GPUs: products, and where a lane's part of their operands and results lies.
#if __CUDA_ARCH__ >= 750
#include "turing.cuh"
#else
#include "volta.cuh"
#endif

#endif
