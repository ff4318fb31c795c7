// Emulates AMX's tile instructions with AVX-512, so that kernel_amx.cpp can be tested on processors without tiles. The
// emulation is correct, not fast. An operation that the processor refuses with #UD ends the process here too. Products
// follow Intel's description of TDPBF16PS: the products at even and at odd positions are summed separately in fp32 over
// the whole depth, then both sums are added to the destination.
#ifndef FASTATTENTION_AMX_EMULATION_H
#define FASTATTENTION_AMX_EMULATION_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace {

struct EmulatedTile {
  alignas(64) uint8_t row[16][64];
};
struct EmulatedTiles {
  EmulatedTile tile[8];
  int rows[8], row_bytes[8];
  bool configured;
};
thread_local EmulatedTiles emulated;

inline EmulatedTile& emulated_tile(int i) {
  if (!emulated.configured || emulated.rows[i] == 0) __builtin_trap();
  return emulated.tile[i];
}
inline void emulated_loadconfig(const void* configuration) {
  const uint8_t* bytes = static_cast<const uint8_t*>(configuration);
  if (bytes[0] != 1 || bytes[1] != 0) __builtin_trap();  // palette 1 is the only one; tiles start at their first row
  memset(&emulated, 0, sizeof(emulated));
  for (int i = 0; i < 8; ++i) {
    uint16_t row_bytes;
    memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof(row_bytes));
    emulated.rows[i] = bytes[48 + i];
    emulated.row_bytes[i] = row_bytes;
    if (emulated.rows[i] > 16 || row_bytes > 64 || (row_bytes == 0) != (emulated.rows[i] == 0)) __builtin_trap();
  }
  emulated.configured = true;
}
inline void emulated_release() { emulated.configured = false; }
inline void emulated_zero(int to) { memset(&emulated_tile(to), 0, sizeof(EmulatedTile)); }
inline void emulated_load(int to, const void* from, size_t stride) {
  EmulatedTile& tile = emulated_tile(to);
  memset(&tile, 0, sizeof(tile));
  for (int r = 0; r < emulated.rows[to]; ++r) {
    memcpy(tile.row[r], static_cast<const uint8_t*>(from) + r * stride, emulated.row_bytes[to]);
  }
}
inline void emulated_store(int from, void* to, size_t stride) {
  const EmulatedTile& tile = emulated_tile(from);
  for (int r = 0; r < emulated.rows[from]; ++r) {
    memcpy(static_cast<uint8_t*>(to) + r * stride, tile.row[r], emulated.row_bytes[from]);
  }
}
inline void emulated_product(int to, int left, int right) {
  EmulatedTile& sum = emulated_tile(to);
  const EmulatedTile& a = emulated_tile(left);
  const EmulatedTile& b = emulated_tile(right);
  const int depth = emulated.row_bytes[left] / 4;
  if (to == left || to == right || left == right || emulated.rows[to] != emulated.rows[left] ||
      emulated.row_bytes[to] != emulated.row_bytes[right] || emulated.rows[right] != depth) {
    __builtin_trap();
  }
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  for (int m = 0; m < emulated.rows[to]; ++m) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int k = 0; k < depth; ++k) {
      uint32_t pair;
      memcpy(&pair, a.row[m] + 4 * k, sizeof(pair));
      const __m512i pairs = _mm512_load_si512(b.row[k]);
      even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(pair << 16))),
                             _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), even);
      odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(pair & 0xffff0000))),
                            _mm512_castsi512_ps(_mm512_and_si512(pairs, upper)), odd);
    }
    _mm512_store_ps(sum.row[m], _mm512_add_ps(_mm512_load_ps(sum.row[m]), _mm512_add_ps(even, odd)));
  }
}

}  // namespace

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_dpbf16ps emulated_product

#endif
