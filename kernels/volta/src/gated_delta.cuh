// What both kernels of the gated delta rule share: sizes, scratch, and sums of logarithms.
#ifndef FASTATTENTION_VOLTA_GATED_DELTA_CUH
#define FASTATTENTION_VOLTA_GATED_DELTA_CUH

#include "device.cuh"
#include "gated_delta.h"

namespace fastattention {

constexpr int kTokens = 64;                 // of a chunk
constexpr int kBlocks = kTokens / 16;       // of 16 tokens
constexpr int kSize = 128;                  // of keys and values
constexpr int kChunks = kSize / 8;          // of 16 bytes
constexpr int kMatrixChunks = kTokens / 8;  // in a row of a matrix
constexpr int kMatrix = kTokens * kMatrixChunks;

// The matrices of a chunk and value head, 64 x 64: the inverse in two parts, whose sum is exact to 22 bits, and weights
// of changes in the output. Blocks of 16 x 16 above the diagonal of the last are not written.
enum Matrix { kUpper, kLower, kWeights, kMatrices };

// Numbers of a chunk and value head: for each token, the factors of the state as the key sees it, of the state as the
// query sees it, and of the token's change in the state after the chunk; and the power of 2 of its key. At the end, the
// decay over the chunk.
enum Factor { kSeen, kAsked, kKept, kPower, kFactorRows };
constexpr int kDecay = kFactorRows * kTokens;
constexpr int kFactors = kDecay + 4;

// Blocks that are computed of a chunk. Decoding requests come with prompts, as chunks of a token.
FA_DEVICE int used_blocks(int rows) { return rows <= 16 ? 1 : kBlocks; }

FA_DEVICE float lower_half(u32 pair) { return to_float(static_cast<Half>(pair & 0xffff)); }
FA_DEVICE float upper_half(u32 pair) { return to_float(static_cast<Half>(pair >> 16)); }

// Two numbers as sums of two fp16 numbers each, in pairs.
FA_DEVICE void split(u32& upper, u32& lower, float a, float b) {
  upper = pack(a, b);
  lower = pack(a - lower_half(upper), b - upper_half(upper));
}

FA_DEVICE size_t of_chunk(const GatedDelta& p, int chunk, int head) {
  return static_cast<size_t>(chunk) * p.value_heads + head;
}

}  // namespace fastattention

#endif
