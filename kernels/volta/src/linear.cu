// A few rows times a matrix of quantised weights. The time goes into reading the weights once.
//
// Each CTA computes a few tiles of eight columns, over all of k. Its warps take turns at units of k, with all of the
// CTA's tiles, so that a lane's numbers of x stay in registers. Each quadpair computes a quarter of the unit's k. At
// the end, the sums of quadpairs and warps are added in a fixed order.
#include "weights.cuh"

#ifndef ROWS
#define ROWS 8
#endif
#ifndef TILES
#define TILES 7
#endif
#ifndef WARPS
#define WARPS 8
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 2
#endif

namespace fastattention {

constexpr int kTiles = TILES;        // of a CTA, at most
constexpr int kProducts = ROWS / 8;  // of eight rows
constexpr int kPieces = kUnit / 32;  // of eight numbers of x, for each lane, product and unit
constexpr int kAll = kProducts * kPieces;
constexpr bool kStaged = kProducts > 1;  // the next unit's x waits in shared memory, because registers are few
constexpr int kAtOnce = (kAll + kTiles - 2) / (kTiles - 1);  // pieces of x that are requested with a tile

struct Unit {
  uint4 weights;
  Scale scale;
};

FA_DEVICE void multiply(float (&sums)[kProducts][8], const uint4 (&x)[kProducts][kPieces], const Unit& unit) {
  const u32 words[4] = {unit.weights.x, unit.weights.y, unit.weights.z, unit.weights.w};
  FA_UNROLL
  for (int i = 0; i < 4; ++i) {
    u32 pairs[kPairs];
    to_operands(pairs, words[i], unit.scale);
    FA_UNROLL
    for (int j = 0; j < kPairs; j += 2) {
      FA_UNROLL
      for (int m = 0; m < kProducts; ++m) {
        const uint4& piece = x[m][(i * kPairs + j) / 4];
        const bool upper = (i * kPairs + j) & 2;
        multiply_by_columns(sums[m], upper ? piece.z : piece.x, upper ? piece.w : piece.y, pairs[j], pairs[j + 1]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM) fa_volta_linear(const Linear p) {
  extern __shared__ uint4 shared[];
  const int threads = blockDim.x, warps = threads / 32, warp = threadIdx.x / 32;
  const WeightLane lane(threadIdx.x & 31);  // its slot is also its row of x
  const Weights& w = p.weights;
  const int quadpair = lane.quadpair;
  const int block = blockIdx.x, first = block * p.tiles + min(block, p.more), tiles = p.tiles + (block < p.more);

  const uint4* const weights = lane.packed(w, first);
  const auto load = [&](int number, int tile) {
    Unit unit{make_uint4(0, 0, 0, 0), no_scale()};
    if (number < w.units && tile < tiles) {
      unit.weights = weights[(tile * w.units + number) * 32];
      unit.scale = lane.scale(w, first + tile, number);
    }
    return unit;
  };
  const uint4* rows[kProducts];
  bool has[kProducts];
  FA_UNROLL
  for (int m = 0; m < kProducts; ++m) {
    has[m] = 8 * m + lane.slot < p.rows;
    rows[m] = reinterpret_cast<const uint4*>(static_cast<const Half*>(p.x) +
                                             static_cast<size_t>(8 * m + lane.slot) * p.x_stride);
  }
  const auto load_x = [&](int i, int number) {  // piece i of a unit
    const int chunk = (4 * number + quadpair) * kPieces + i % kPieces;
    return has[i / kPieces] && chunk < w.chunks ? rows[i / kPieces][chunk] : make_uint4(0, 0, 0, 0);
  };

  Unit next[2] = {load(warp, 0), load(warp, 1)};
  float sums[kTiles][kProducts][8];
  FA_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    FA_UNROLL
    for (int m = 0; m < kProducts; ++m) {
      FA_UNROLL
      for (int e = 0; e < 8; ++e) sums[tile][m][e] = 0.0f;
    }
  }
  if (kStaged) {
    FA_UNROLL
    for (int i = 0; i < kAll; ++i) shared[i * threads + threadIdx.x] = load_x(i, warp);
  }
#pragma unroll 1
  for (int number = warp; number < w.units; number += warps) {
    uint4 x[kProducts][kPieces], coming[kAtOnce];
    FA_UNROLL
    for (int i = 0; i < kAll; ++i) {
      x[i / kPieces][i % kPieces] = kStaged ? shared[i * threads + threadIdx.x] : load_x(i, number);
    }
    FA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      const Unit unit = next[0];
      next[0] = next[1];
      next[1] = tile + 2 < kTiles ? load(number, tile + 2) : load(number + warps, tile + 2 - kTiles);
      if (kStaged) {
        FA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          const int earlier = (tile - 1) * kAtOnce + i, now = tile * kAtOnce + i;
          if (tile > 0 && earlier < kAll) shared[earlier * threads + threadIdx.x] = coming[i];
          if (now < kAll) coming[i] = load_x(now, number + warps);
        }
      }
      // Missing tiles have weights of zero, so that most tiles need no branch, which would keep loads from moving
      // ahead.
      if (tile + 1 == kTiles && tile >= tiles) continue;
#if WEIGHT == E4M3
      float group[kProducts][8];
      FA_UNROLL
      for (int m = 0; m < kProducts; ++m) {
        FA_UNROLL
        for (int e = 0; e < 8; ++e) group[m][e] = 0.0f;
      }
      multiply(group, x, unit);
      FA_UNROLL
      for (int m = 0; m < kProducts; ++m) {
        FA_UNROLL
        for (int e = 0; e < 8; ++e) sums[tile][m][e] += group[m][e] * factor_of(unit.scale);
      }
#else
      multiply(sums[tile], x, unit);
#endif
    }
  }

  // A lane's elements are two rows (bit 1 of the element) by four columns. Quadpairs 0 and 1 exchange one row each, and
  // so do 2 and 3. With sixteen rows, both pairs then exchange eight of them.
  if (kStaged) __syncthreads();  // its x is overwritten
  float4* const parts = reinterpret_cast<float4*>(shared);
  FA_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    float kept[kProducts][4];
    FA_UNROLL
    for (int m = 0; m < kProducts; ++m) {
      FA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int e = (i & 1) | i >> 1 << 2;
        const float lower = sums[tile][m][e], upper = sums[tile][m][e + 2];
        const float received = __shfl_xor_sync(~0u, quadpair & 1 ? lower : upper, 4);
        kept[m][i] = (quadpair & 1 ? upper : lower) + received;
      }
    }
    if (kProducts > 1) {
      FA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float lower = kept[0][i], upper = kept[kProducts - 1][i];
        const float received = __shfl_xor_sync(~0u, quadpair & 2 ? lower : upper, 8);
        kept[0][i] = (quadpair & 2 ? upper : lower) + received;
      }
    }
    parts[(warp * kTiles + tile) * 32 + lane.index] = make_float4(kept[0][0], kept[0][1], kept[0][2], kept[0][3]);
  }
  __syncthreads();
  const float* const flat = reinterpret_cast<const float*>(shared);
  const int columns = 8 * tiles;
  for (int i = threadIdx.x; i < p.rows * columns; i += threads) {
    const int row = i / columns, at = i - row * columns, column = 8 * first + at;
    const int of_lane = (row & 1) | (at & 2) | (row & 2) << 1 | (row & 8) | (row & 4) << 2;
    const int element = (at & 1) | (at & 4) >> 1;
    float sum = 0.0f;
    FA_UNROLL
    for (int of_warp = 0; of_warp < WARPS; ++of_warp) {
      if (of_warp >= warps) continue;
      const float* const own = flat + ((of_warp * kTiles + at / 8) * 32 + of_lane) * 4 + element;
      sum += kProducts > 1 ? own[0] : own[0] + own[8 * 4];
    }
    if (w.factor != nullptr) sum *= w.factor[column];
    if (p.bias != nullptr) sum += to_float(p.bias[column]);
    p.out[static_cast<size_t>(row) * w.columns + column] = to_half(sum);
  }
}

}  // namespace fastattention
