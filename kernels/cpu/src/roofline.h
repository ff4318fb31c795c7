// Measures what limits an attention kernel on this machine: how fast memory can be read, and how fast the arithmetic
// units run on registers alone. Translation units with different -m flags include this header, so it holds plain data
// only.
#ifndef FASTATTENTION_ROOFLINE_H
#define FASTATTENTION_ROOFLINE_H

#include <stdint.h>

namespace fastattention {

// How a thread reads its share: `streams` places in turn, prefetching `prefetch_bytes` ahead in each (0: leave that to
// the hardware).
struct ReadMethod {
  int32_t prefetch_bytes;
  int32_t streams;  // 1, 2 or 4
};

// Exclusive or of all 64-bit words of [data, data + bytes); bytes is a multiple of 8.
using ReadLoop = uint64_t (*)(const void* data, int64_t bytes, ReadMethod method);

// Arithmetic on independent accumulators in registers, without memory access. The compiler cannot remove it, because
// run() returns the result.
struct PeakLoop {
  const char* name;
  int64_t flops_per_iteration;  // a multiply-add counts as 2
  float (*run)(int64_t iterations);
};

}  // namespace fastattention

#endif
