#include <immintrin.h>

#include "roofline.h"

namespace fastattention {
namespace {

// Every tile has 16 rows of 64 bytes, so one instruction computes 16 x 16 sums of 32 products each.
struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};
constexpr int kAccumulators = 6;

float amx_loop(int64_t iterations) {
  TileConfig before, config = {};
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes_per_row[tile] = 64;
    config.rows[tile] = 16;
  }
  // GCC's optimiser believes that the intrinsics use only the first 8 bytes. Without this it drops the other stores.
  asm volatile("" : : "r"(&config), "r"(&before) : "memory");
  _tile_storeconfig(&before);  // this may be an attention thread that has configured its tiles
  _tile_loadconfig(&config);   // also zeroes all tiles
  for (int64_t i = 0; i < iterations; ++i) {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
    _tile_dpbf16ps(4, 6, 7);
    _tile_dpbf16ps(5, 6, 7);
  }
  if (before.palette != 0) {
    _tile_loadconfig(&before);
  } else {
    _tile_release();
  }
  return 0.0f;
}

}  // namespace

extern const PeakLoop kAmxBf16;
const PeakLoop kAmxBf16 = {"bf16_amx", int64_t{kAccumulators} * 16 * 16 * 32 * 2, amx_loop};

}  // namespace fastattention
