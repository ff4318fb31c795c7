// Quantised weights as fp16, for products of many rows by a library. Each warp converts one unit.
#include "weights.cuh"

#ifndef WARPS
#define WARPS 4
#endif

namespace fastattention {

extern "C" __global__ void __launch_bounds__(32 * WARPS) fa_volta_unpack(const Unpack p) {
  const WeightLane lane(threadIdx.x & 31);
  const Weights& w = p.weights;
  const int tile = p.first_tile + blockIdx.x, unit = blockIdx.y * WARPS + threadIdx.x / 32;
  if (unit >= w.units) return;
  const uint4 packed = lane.packed(w, tile)[unit * 32];
  const Scale scale = lane.scale(w, tile, unit);
  const float factor = factor_of(scale) * (w.factor == nullptr ? 1.0f : w.factor[8 * tile + lane.slot]);
  const bool as_is = WEIGHT != E4M3 && w.factor == nullptr;
  const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
  u32 pairs[4 * kPairs];
  FA_UNROLL
  for (int i = 0; i < 4; ++i) {
    u32 found[kPairs];
    to_operands(found, words[i], scale);
    FA_UNROLL
    for (int j = 0; j < kPairs; ++j) {
      const float low = to_float(static_cast<Half>(found[j])), high = to_float(static_cast<Half>(found[j] >> 16));
      pairs[i * kPairs + j] = as_is ? found[j] : pack(low * factor, high * factor);
    }
  }
  // Lanes of neighbouring columns exchange every second chunk of eight numbers, so that two lanes write whole sectors
  // of 32 bytes.
  const int odd = lane.slot & 1;
  uint4* const out = reinterpret_cast<uint4*>(p.out) + static_cast<size_t>(8 * blockIdx.x + lane.slot - odd) * w.chunks;
  FA_UNROLL
  for (int i = 0; i < kPairs; i += 2) {
    u32 even[4], other[4];  // this lane's chunk of the even column, and of the odd one
    FA_UNROLL
    for (int j = 0; j < 4; ++j) {
      const u32 first = pairs[4 * i + j], second = pairs[4 * (i + 1) + j];
      const u32 received = __shfl_xor_sync(~0u, odd ? first : second, 1);
      even[j] = odd ? received : first;
      other[j] = odd ? second : received;
    }
    const int chunk = (4 * unit + lane.quadpair) * kPairs + i + odd;
    if (chunk >= w.chunks) continue;
    out[chunk] = make_uint4(even[0], even[1], even[2], even[3]);
    out[w.chunks + chunk] = make_uint4(other[0], other[1], other[2], other[3]);
  }
}

}  // namespace fastattention
