// The read loop and the fp32 multiply-add loop, on vectors of kBytes bytes. The including file defines kBytes. GCC
// compiles the vector types to the instructions that the file's -m flags allow.
#include "roofline.h"

namespace fastattention {
namespace {

// An empty instruction that, to the compiler, changes the register.
#if defined(__aarch64__)
#define FA_OPAQUE(x) asm volatile("" : "+w"(x))
#elif defined(__AVX512F__)
#define FA_OPAQUE(x) asm volatile("" : "+v"(x))
#elif defined(__x86_64__)
#define FA_OPAQUE(x) asm volatile("" : "+x"(x))
#else
#define FA_OPAQUE(x) asm volatile("" : "+m"(x))
#endif

typedef uint64_t Words __attribute__((vector_size(kBytes), aligned(8), may_alias));
typedef float Floats __attribute__((vector_size(kBytes)));

constexpr int64_t kLine = 64;
constexpr int64_t kStep = 256;  // bytes of each stream per turn

// Streams begin `apart` bytes from each other. Each takes `turns` steps.
template <int kStreams, bool kPrefetch>
uint64_t read_streams(const char* data, int64_t apart, int64_t turns, int64_t ahead) {
  Words sums[4] = {};
  for (int64_t turn = 0; turn < turns; ++turn) {
    _Pragma("GCC unroll 4") for (int s = 0; s < kStreams; ++s) {
      const char* from = data + s * apart + turn * kStep;
      if (kPrefetch) {
        // Prefetches past the end of the data may name memory that does not exist; processors ignore them.
        _Pragma("GCC unroll 4") for (int64_t line = 0; line < kStep; line += kLine) {
          __builtin_prefetch(from + ahead + line, 0, 2);  // into L2, which is 2 % faster than into L1 on Emerald Rapids
        }
      }
      _Pragma("GCC unroll 16") for (int64_t i = 0; i < kStep / kBytes; ++i) {
        sums[i % 4] ^= *reinterpret_cast<const Words*>(from + i * kBytes);
      }
    }
  }
  const Words sum = (sums[0] ^ sums[1]) ^ (sums[2] ^ sums[3]);
  uint64_t result = 0;
  for (int i = 0; i < kBytes / 8; ++i) result ^= sum[i];
  return result;
}

uint64_t read_loop(const void* data, int64_t bytes, ReadMethod method) {
  const char* from = static_cast<const char*>(data);
  const int64_t turns = bytes / (method.streams * kStep);
  const int64_t apart = turns * kStep;
  const int64_t ahead = method.prefetch_bytes;
  uint64_t sum = 0;
  if (method.streams == 4) {
    sum = ahead > 0 ? read_streams<4, true>(from, apart, turns, ahead) : read_streams<4, false>(from, apart, turns, 0);
  } else if (method.streams == 2) {
    sum = ahead > 0 ? read_streams<2, true>(from, apart, turns, ahead) : read_streams<2, false>(from, apart, turns, 0);
  } else {
    sum = ahead > 0 ? read_streams<1, true>(from, apart, turns, ahead) : read_streams<1, false>(from, apart, turns, 0);
  }
  for (int64_t i = apart * method.streams; i < bytes; i += 8) {
    uint64_t word;
    __builtin_memcpy(&word, from + i, 8);
    sum ^= word;
  }
  return sum;
}

// Two units with a latency of 4 or 5 cycles need ten accumulators. Twelve accumulators and two operands fit the 16
// registers of AVX2 and SSE.
constexpr int kAccumulators = 12;
#define FA_ACCUMULATORS _Pragma("GCC unroll 12")

float fma_loop(int64_t iterations) {
  Floats sums[kAccumulators];
  FA_ACCUMULATORS for (int a = 0; a < kAccumulators; ++a) {
    sums[a] = Floats{};
    FA_OPAQUE(sums[a]);  // otherwise the compiler would see that all are equal and keep one
  }
  Floats x = Floats{} + 0.5f, y = Floats{} + 1e-3f;
  for (int64_t i = 0; i < iterations; ++i) {
    FA_OPAQUE(x);
    FA_OPAQUE(y);
    FA_ACCUMULATORS for (int a = 0; a < kAccumulators; ++a) sums[a] = sums[a] * x + y;
  }
  for (int a = 1; a < kAccumulators; ++a) sums[0] += sums[a];
  return sums[0][0];
}

}  // namespace
}  // namespace fastattention
