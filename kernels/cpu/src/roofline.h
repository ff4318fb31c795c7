// What bounds an attention kernel on this machine, measured: how fast memory can be read and how fast the arithmetic
// units run on registers alone. Included by translation units with different -m flags, so plain data only.
#ifndef FASTATTENTION_ROOFLINE_H
#define FASTATTENTION_ROOFLINE_H

#include <stdint.h>

namespace fastattention {

// How a thread reads its share: `streams` places at a time, each asking for data `prefetch_bytes` ahead (0: leave that
// to the hardware).
struct ReadMethod {
  int32_t prefetch_bytes;
  int32_t streams;  // 1, 2 or 4
};

// Exclusive or of all 64-bit words of [data, data + bytes); bytes is a multiple of 8.
using ReadLoop = uint64_t (*)(const void* data, int64_t bytes, ReadMethod method);

// Independent accumulators in registers and no memory access. What run() returns keeps the compiler from leaving it
// out.
struct PeakLoop {
  const char* name;
  int64_t flops_per_iteration;  // a multiply-add counts 2
  float (*run)(int64_t iterations);
};

}  // namespace fastattention

#endif
