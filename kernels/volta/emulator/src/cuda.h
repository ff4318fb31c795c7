// Replaces the built-ins of CUDA C++, for kernels that are compiled as ordinary C++.
#ifndef VOLTA_EMULATOR_CUDA_H
#define VOLTA_EMULATOR_CUDA_H

#include <cmath>
#include <cstring>

#include "block.h"
#include "memory.h"

#define __global__
#define __device__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)

// 16-byte values report their copies themselves, because this compiler may split a copy that machine code makes in one
// access.
struct alignas(16) uint4 {
  unsigned x, y, z, w;

  uint4() = default;
  uint4(unsigned a, unsigned b, unsigned c, unsigned d) : x(a), y(b), z(c), w(d) {}
  uint4(const uint4& from) { copy(from); }
  uint4& operator=(const uint4& from) {
    volta_emulator::touch(this, 16, 16, true);
    copy(from);
    return *this;
  }

 private:
  void copy(const uint4& from) {
    volta_emulator::touch(&from, 16, 16, false);
    x = from.x, y = from.y, z = from.z, w = from.w;
  }
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct alignas(8) uint2 {
  unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define threadIdx (::volta_emulator::thread_index())
#define blockIdx (::volta_emulator::block_index())
#define blockDim (::volta_emulator::block_size())
#define gridDim (::volta_emulator::grid_size())
namespace volta_emulator {
Index thread_index();
Index block_index();
Index block_size();
Index grid_size();
void wait_for_block();
void wait_for_warp();
void check_mask(unsigned mask);
unsigned shuffle(unsigned value, int lane);
}  // namespace volta_emulator

inline void __syncthreads() { volta_emulator::wait_for_block(); }
inline void __syncwarp(unsigned mask = ~0u) {
  volta_emulator::check_mask(mask);
  volta_emulator::wait_for_warp();
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  static_assert(sizeof(T) == 4, "a lane passes 32 bits");
  volta_emulator::check_mask(mask);
  unsigned bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits = volta_emulator::shuffle(bits, lane);
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ lanes);
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline int __float_as_int(float value) {
  if (std::isnan(value)) return 0x7fffffff;  // the only NaN that the GPU's arithmetic produces; x86 has others
  int bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {  // does not support sign replication
  const unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i) chosen |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return chosen;
}
inline float __fdividef(float a, float b) {  // as defined in the CUDA Programming Guide, "Intrinsic Functions"
  return std::fabs(b) > 0x1p126f && std::fabs(b) < INFINITY ? 0.0f * a : a / b;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }

#endif
