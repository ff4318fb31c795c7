#include "instructions.h"

#include <cmath>

#include "block.h"
#include "cuda.h"
#include "half.h"
#include "memory.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace volta_emulator {

Index thread_index() { return {static_cast<unsigned>(block.running), 0, 0}; }
Index block_index() { return block.index; }
Index block_size() { return block.size; }
Index grid_size() { return block.grid; }
void wait_for_block() { do_together(Together::kBlock); }
void wait_for_warp() { do_together(Together::kWarp); }

void check_mask(unsigned mask) {
  if (mask != ~0u)
    fail(thread_name(block.running) + " uses a mask of some lanes, but the emulator supports masks of all lanes only.");
}

unsigned shuffle(unsigned value, int lane) {
  Part& part = block.thread().part;
  part.in[0] = value;
  part.in[1] = static_cast<unsigned>(lane);
  do_together(Together::kShuffle);
  return part.out[0];
}

namespace {

void multiply(Together what, float* d, int sums, unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
  Part& part = block.thread().part;
  part.in[0] = a0, part.in[1] = a1, part.in[2] = b0, part.in[3] = b1;
  for (int i = 0; i < sums; ++i) part.sums[i] = d[i];
  do_together(what);
  for (int i = 0; i < sums; ++i) d[i] = part.sums[i];
}

}  // namespace

void multiply_quadpairs(float (&d)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1, bool b_by_rows) {
  multiply(b_by_rows ? Together::kProductByRows : Together::kProductByColumns, d, 8, a0, a1, b0, b1);
}

void multiply_16(float* d, unsigned a0, unsigned a1, unsigned b) { multiply(Together::kProduct16, d, 4, a0, a1, b, 0); }

void load_matrices(unsigned* to, int count, const void* row, bool transposed) {
  Thread& thread = block.thread();
  if (block.running % kLanes < 8 * count) touch(row, 16, 16, false);
  thread.part.row = static_cast<const unsigned char*>(row);
  thread.part.detail = count + 8 * transposed;
  do_together(Together::kLoad);
  thread.part.detail = 0;
  for (int i = 0; i < count; ++i) to[i] = thread.part.out[i];
}

unsigned transpose(unsigned pair) {
  Part& part = block.thread().part;
  part.in[0] = pair;
  do_together(Together::kTranspose);
  return part.out[0];
}

void wait_for_pair(int number) {
  Thread& thread = block.thread();
  thread.part.detail = number;
  do_together(Together::kPair);
  thread.part.detail = 0;
}

float power_of_2(float x) {  // ex2.approx.ftz flushes subnormals to zero
  const float y = std::exp2(x);
  return std::fabs(y) < 0x1p-126f ? 0.0f : y;
}

unsigned short to_half(float x) { return volta_sim::double_to_half(x); }
float to_float(unsigned short x) { return volta_sim::half_to_float(x); }

unsigned add_halves(unsigned a, unsigned b) {
  using namespace volta_sim;
  return pack_halves(static_cast<double>(low_half(a)) + low_half(b), static_cast<double>(high_half(a)) + high_half(b));
}

unsigned multiply_add_halves(unsigned a, unsigned b, unsigned c) {  // rounded once
  using namespace volta_sim;
  return pack_halves(static_cast<double>(low_half(a)) * low_half(b) + low_half(c),
                     static_cast<double>(high_half(a)) * high_half(b) + high_half(c));
}

// Other GPUs are other processes here, which share memory.
void store_to_peer(void* to, unsigned x, unsigned y, unsigned z, unsigned w) {
  touch(to, 16, 16, true);
  auto* const halves = static_cast<uint64_t*>(to);
  __atomic_store_n(halves, static_cast<uint64_t>(y) << 32 | x, __ATOMIC_RELEASE);
  __atomic_store_n(halves + 1, static_cast<uint64_t>(w) << 32 | z, __ATOMIC_RELEASE);
}
void load_from_peer(unsigned (&to)[4], const void* from) {
  touch(from, 16, 16, false);
  const auto* const halves = static_cast<const uint64_t*>(from);
  for (int i = 0; i < 2; ++i) {
    const uint64_t half = __atomic_load_n(halves + i, __ATOMIC_ACQUIRE);
    to[2 * i] = static_cast<unsigned>(half);
    to[2 * i + 1] = static_cast<unsigned>(half >> 32);
  }
}

int round_to_int(float x) {  // saturates
  if (std::isnan(x)) return 0;
  return static_cast<int>(std::nearbyint(std::fmin(std::fmax(x, -0x1p31), 0x1p31 - 1)));
}

}  // namespace volta_emulator
