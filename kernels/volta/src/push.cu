// Sums over the GPUs of one machine, for tensors so small that the time until the first byte arrives is all that
// counts. Each rank stores its numbers on all other ranks' boards, and adds what it finds on its own one. Writes over
// PCIe need no answer, reads do. All ranks add in the order of ranks, in fp32, so they get the same bits.
//
// A chunk travels with the number of the call, twice, in one store of 16 bytes, of which each half arrives as a whole.
// So the data is complete when both numbers are there: no flag follows it, and nothing waits for a fence.
//
// Calls use the halves of a board in turn. When a rank writes into a half again, two calls later, it has read what the
// others sent in the call between. They sent that after they had read everything of the call before.
#include "instructions.cuh"
#include "push.h"

#define FP16 0
#define BF16 1
#define FP32 2
#ifndef NUMBER
#define NUMBER FP16
#endif
#ifndef THREADS
#define THREADS 128
#endif

namespace fastattention {

constexpr int kMostRanks = 8;
constexpr int kNumbers = NUMBER == FP32 ? 1 : 2;  // in a word

FA_DEVICE void widen(float (&to)[kNumbers], u32 word) {
#if NUMBER == FP16
  to[0] = to_float(static_cast<Half>(word));
  to[1] = to_float(static_cast<Half>(word >> 16));
#elif NUMBER == BF16
  to[0] = __int_as_float(static_cast<int>(word << 16));
  to[1] = __int_as_float(static_cast<int>(word & 0xffff0000));
#else
  to[0] = __int_as_float(static_cast<int>(word));
#endif
}

#if NUMBER == BF16
FA_DEVICE u32 to_bf16(float x) {  // ties to even
  const u32 bits = static_cast<u32>(__float_as_int(x));
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#endif

FA_DEVICE u32 narrow(const float (&from)[kNumbers]) {
#if NUMBER == FP16
  return pack(from[0], from[1]);
#elif NUMBER == BF16
  return to_bf16(from[0]) | to_bf16(from[1]) << 16;
#else
  return static_cast<u32>(__float_as_int(from[0]));
#endif
}

struct Sums {
  float first[kNumbers], second[kNumbers];

  FA_DEVICE void add(uint2 chunk, bool begin) {
    float a[kNumbers], b[kNumbers];
    widen(a, chunk.x);
    widen(b, chunk.y);
    FA_UNROLL
    for (int i = 0; i < kNumbers; ++i) {
      first[i] = begin ? a[i] : first[i] + a[i];
      second[i] = begin ? b[i] : second[i] + b[i];
    }
  }
};

FA_DEVICE uint2 received(const uint4* from, u32 call, const Push& p) {
  for (int look = 0;; ++look) {
    const uint4 found = load_from_peer(from);
    if (found.y == call && found.w == call) return make_uint2(found.x, found.z);
    if (p.looks > 0 && look >= p.looks) {
      *p.late = 1;
      return make_uint2(0, 0);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) fa_volta_push(const Push p) {
  void* const boards[kMostRanks] = {p.board0, p.board1, p.board2, p.board3, p.board4, p.board5, p.board6, p.board7};
  const u32 call = p.calls[blockIdx.x] + 1;
  const size_t half = static_cast<size_t>(call & 1) * p.ranks * p.slots;
  const uint4* own = nullptr;
  FA_UNROLL
  for (int peer = 0; peer < kMostRanks; ++peer) {
    if (peer == p.rank) own = static_cast<const uint4*>(boards[peer]) + half;
  }
  const int begin = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
  for (int chunk = begin; chunk < p.chunks; chunk += step) {
    const uint2 mine = static_cast<const uint2*>(p.x)[chunk];
    const size_t place = half + static_cast<size_t>(p.rank) * p.slots + chunk;
    FA_UNROLL
    for (int peer = 0; peer < kMostRanks; ++peer) {
      if (peer < p.ranks && peer != p.rank) {
        store_to_peer(static_cast<uint4*>(boards[peer]) + place, make_uint4(mine.x, call, mine.y, call));
      }
    }
  }
  __syncthreads();  // all have read the number of calls, and sent everything
  if (threadIdx.x == 0) p.calls[blockIdx.x] = call;
  for (int chunk = begin; chunk < p.chunks; chunk += step) {
    const uint2 mine = static_cast<const uint2*>(p.x)[chunk];
    Sums sums;
    FA_UNROLL
    for (int peer = 0; peer < kMostRanks; ++peer) {
      if (peer >= p.ranks) break;
      const bool is_own = peer == p.rank;
      sums.add(is_own ? mine : received(own + static_cast<size_t>(peer) * p.slots + chunk, call, p), peer == 0);
    }
    static_cast<uint2*>(p.out)[chunk] = make_uint2(narrow(sums.first), narrow(sums.second));
  }
}

}  // namespace fastattention
