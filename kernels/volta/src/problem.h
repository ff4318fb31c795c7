// What the kernels are asked to compute: plain data, laid out alike for the launcher and for the device.
#ifndef FASTATTENTION_VOLTA_PROBLEM_H
#define FASTATTENTION_VOLTA_PROBLEM_H

namespace fastattention {

// n / divisor for 0 <= n < 2^31 is (n * multiplier) >> (31 + shift), with 2^shift >= divisor and the multiplier rounded
// up.
struct Divisor {
  unsigned divisor, multiplier, shift;
};

// All tensors are fp16 but for lse, and for key and value where they are stored in 8 bits. Strides are in elements,
// those of key and value alike, and multiples of 8.
struct AttentionParams {
  const void* query;  // [num_tokens, num_heads, head_size]
  const void* key;    // [num_blocks, page_size, num_kv_heads, head_size]; without a block table [kv_tokens, ...]
  const void* value;
  void* out;                   // like query
  float* lse;                  // [num_tokens, num_heads], or null
  const int* query_start_loc;  // [num_seqs + 1]
  const int* seq_lens;         // [num_seqs]
  const int* block_table;      // [num_seqs, block_table_stride], or null
  const int* kv_start_loc;     // [num_seqs], where there is no block table
  const float* alibi_slopes;   // [num_heads], or null
  const float* sinks;          // [num_heads], or null
  long long query_token_stride, query_head_stride;
  long long kv_block_stride, kv_token_stride, kv_head_stride;
  long long out_token_stride, out_head_stride;
  long long lse_token_stride, lse_head_stride;
  Divisor page, group;  // tokens of a page, query heads per KV head
  int block_table_stride;
  int window_left, window_right;  // keys that a token sees before and behind itself; -1: all. Causal is 0 behind
  float scale;                    // above 0; with log2(e) in it, and what keys are to be multiplied by
  float softcap;                  // 0: none; with log2(e) in it
  float value_scale;              // what values are to be multiplied by
  float scale_over_softcap;       // scale / softcap, for decoding: no division there
};

// A problem whose keys are attended to in parts, which are summed then. Rows are packed: query tokens times query heads
// per KV head.
struct Split {
  AttentionParams problem;
  // [num_seqs, num_kv_heads, parts, rows, head_size] in fp16: means of what is stored as values, so they lie in its
  // range
  unsigned short* partial_out;
  float* partial_lse;  // [num_seqs, num_kv_heads, parts, rows], in base 2; -inf where nothing was seen
  Divisor parts;       // room for so many of each sequence. Prefill takes all (1: no sums), decoding as many as needed
  int rows;            // room for so many of each sequence
  int min_parts;       // decoding: of a sequence, unless it is short, see part_length; 0: prefill
};

// New keys and values, in fp16, on their way into pages. Strides as above, those of key and value alike.
struct WriteKv {
  const void* key;  // [>= num_tokens, num_kv_heads, head_size]
  const void* value;
  void* key_cache;  // [num_blocks, page_size, num_kv_heads, head_size]
  void* value_cache;
  const long long* slot_mapping;  // [num_tokens]: block * page_size + row; negative: the token is left out
  long long key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  long long block_stride, page_token_stride, page_head_stride;
  int page_size, num_kv_heads, head_size;
  float key_scale, value_scale;  // by which they are divided, where they are stored in 8 bits
};

// Keys of one part of a sequence that is decoded: 128 times a power of two, or half as many again. Long parts are read
// faster, more of them keep more SMs busy: they grow up to 1024 keys while there are min_parts of them, and beyond
// that, so that there are 64 at most. With min_parts a sequence has 64 blocks of threads. Where parts half as long
// again make 60 to 80 of them, they are taken: shorter ones would give some of the 80 SMs two blocks and others one. It
// depends on the sequence and the model alone, and so do results, whatever the batch.
#ifdef __CUDACC__
__device__
#endif
    inline int part_length(int kv_len, int min_parts) {
  int length = 128;
  while (64 * length < kv_len || (length < 1024 && kv_len >= 2 * length * min_parts)) length *= 2;
  // Without divisions: a block of threads begins with this.
  const int longer = length / 2 * 3, fewest = (15 * min_parts + 15) / 16, most = 5 * min_parts / 4;
  return length < 1024 && kv_len > longer * (fewest - 1) && kv_len <= longer * most ? longer : length;
}

}  // namespace fastattention

#endif
