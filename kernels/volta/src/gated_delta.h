// Parameters of the gated delta rule over prompts: plain data with the same layout in the launcher and on the device.
#ifndef FASTATTENTION_VOLTA_GATED_DELTA_H
#define FASTATTENTION_VOLTA_GATED_DELTA_H

namespace fastattention {

// Heads have 128 numbers. Value head i has the key head i / (value_heads / key_heads). Strides are from token to token,
// multiples of 8; heads of a token follow each other.
//
// A chunk is up to 64 tokens of a request. Requests' pieces begin with a chunk.
struct GatedDelta {
  const void* q;  // fp16 [tokens, key_heads, 128], 16 bytes aligned, as are k, v and out
  const void* k;
  const void* v;        // fp16 [tokens, value_heads, 128]
  const float* g;       // [tokens, value_heads], logarithms of decays, not above 0
  const float* beta;    // [tokens, value_heads], 0 to 1
  const float* before;  // [requests, value_heads, 128 of values, 128 of keys]
  float* after;         // the same; may be the same memory
  void* out;            // fp16 [tokens, value_heads, 128]
  void* matrices;       // scratch: fp16 [chunks, value_heads, 3, 64, 64]
  float* factors;       // scratch: [chunks, value_heads, 260]
  const int* chunks;    // [chunks, 2]: the first token, and the end
  const int* pieces;    // [pieces, 4]: the first token, the end, the first chunk, the request
  int key_heads, value_heads;
  int q_stride, k_stride, v_stride, out_stride;
  int normalise;  // whether queries and keys are divided by their length
};

}  // namespace fastattention

#endif
