// Replaces the instructions of kernels/volta/src/instructions.cuh, which explains each of them.
#ifndef VOLTA_EMULATOR_INSTRUCTIONS_H
#define VOLTA_EMULATOR_INSTRUCTIONS_H

#include "cuda.h"

namespace volta_emulator {
void multiply_quadpairs(float (&d)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1, bool b_by_rows);
void multiply_16(float* d, unsigned a0, unsigned a1, unsigned b);
void load_matrices(unsigned* to, int count, const void* row, bool transposed);
unsigned transpose(unsigned pair);
void wait_for_pair(int number);
float power_of_2(float x);
unsigned short to_half(float x);
float to_float(unsigned short x);
unsigned add_halves(unsigned a, unsigned b);
unsigned multiply_add_halves(unsigned a, unsigned b, unsigned c);
int round_to_int(float x);
void store_to_peer(void* to, unsigned x, unsigned y, unsigned z, unsigned w);
void load_from_peer(unsigned (&to)[4], const void* from);
}  // namespace volta_emulator

namespace fastattention {

inline void multiply_by_columns(float (&d)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
  volta_emulator::multiply_quadpairs(d, a0, a1, b0, b1, false);
}
inline void multiply_by_rows(float (&d)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
  volta_emulator::multiply_quadpairs(d, a0, a1, b0, b1, true);
}
inline void multiply_16x8(float* d, unsigned a0, unsigned a1, unsigned b) { volta_emulator::multiply_16(d, a0, a1, b); }
inline unsigned transpose_matrix(unsigned pair) { return volta_emulator::transpose(pair); }
template <int kCount>
void load_matrices(unsigned (&to)[kCount], const uint4* tile, int place, int chunk) {
  volta_emulator::load_matrices(to, kCount, tile + (place ^ chunk), false);
}
inline void load_transposed_matrices(unsigned (&to)[4], const uint4* tile, int place, int chunk) {
  volta_emulator::load_matrices(to, 4, tile + (place ^ chunk), true);
}
inline void wait_for_pair(int number) { volta_emulator::wait_for_pair(number); }
inline float exp2(float x) { return volta_emulator::power_of_2(x); }
inline float multiply(float a, float b) { return a * b; }
inline unsigned short to_half(float x) { return volta_emulator::to_half(x); }
inline float to_float(unsigned short x) { return volta_emulator::to_float(x); }
inline unsigned add_halves(unsigned a, unsigned b) { return volta_emulator::add_halves(a, b); }
inline unsigned multiply_add_halves(unsigned a, unsigned b, unsigned c) {
  return volta_emulator::multiply_add_halves(a, b, c);
}
inline unsigned multiply_halves(unsigned a, unsigned b) { return multiply_add_halves(a, b, 0x80008000); }
inline unsigned and_or(unsigned a, unsigned b, unsigned c) { return (a & b) | c; }
inline int round_to_int(float x) { return volta_emulator::round_to_int(x); }
inline void store_to_peer(uint4* to, const uint4& x) { volta_emulator::store_to_peer(to, x.x, x.y, x.z, x.w); }
inline uint4 load_from_peer(const uint4* from) {
  unsigned x[4];
  volta_emulator::load_from_peer(x, from);
  return {x[0], x[1], x[2], x[3]};
}
inline unsigned pack(float a, float b) { return to_half(a) | static_cast<unsigned>(to_half(b)) << 16; }

}  // namespace fastattention

#endif
