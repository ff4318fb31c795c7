// Parameters of the kernels: plain data with the same layout in the launcher and on the device.
#ifndef FASTATTENTION_VOLTA_PROBLEM_H
#define FASTATTENTION_VOLTA_PROBLEM_H

namespace fastattention {

// A divisor for integers 0 <= n < 2^31: n / divisor = (n * multiplier) >> (31 + shift), where 2^shift >= divisor and
// the multiplier is rounded up.
struct Divisor {
  unsigned divisor, multiplier, shift;
};

// All tensors are fp16, except lse (fp32) and key and value if they are stored in 8 bits. Strides count elements and
// are multiples of 8. key and value have the same strides.
struct AttentionParams {
  const void* query;  // [num_tokens, num_heads, head_size]
  const void* key;    // [num_blocks, page_size, num_kv_heads, head_size]; without a block table [kv_tokens, ...]
  const void* value;
  void* out;                   // like query
  float* lse;                  // [num_tokens, num_heads], or null
  const int* query_start_loc;  // [num_seqs + 1]
  const int* seq_lens;         // [num_seqs]
  const int* block_table;      // [num_seqs, block_table_stride], or null
  const int* kv_start_loc;     // [num_seqs], used without a block table
  const float* alibi_slopes;   // [num_heads], or null
  const float* sinks;          // [num_heads], or null
  long long query_token_stride, query_head_stride;
  long long kv_block_stride, kv_token_stride, kv_head_stride;
  long long out_token_stride, out_head_stride;
  long long lse_token_stride, lse_head_stride;
  Divisor page, group;  // tokens of a page, query heads per KV head
  int block_table_stride;
  int window_left, window_right;  // keys that a token sees before and after itself; -1: all. Causal: 0 after
  float scale;                    // > 0; includes log2(e) and the scale of the stored keys
  float softcap;                  // 0: none; includes log2(e)
  float value_scale;              // scale of the stored values
  float scale_over_softcap;       // scale / softcap, so that the decode kernel need not divide
};

// A problem whose keys are divided into parts, with partial results that are merged afterwards. Rows are packed: query
// tokens times query heads per KV head.
struct Split {
  AttentionParams problem;
  // [num_seqs, num_kv_heads, parts, rows, head_size] in fp16: means of the stored values, so they are within
  // their range.
  unsigned short* partial_out;
  float* partial_lse;  // [num_seqs, num_kv_heads, parts, rows], in base 2; -inf for rows that saw nothing
  Divisor parts;  // space for this many parts per sequence. Prefill uses all (1: no merge), decode as many as needed
  int rows;       // space for this many rows per sequence
  int min_parts;  // decode: minimum parts of a sequence that is not short, see part_length; 0: prefill
};

// New keys and values in fp16, to be stored in pages. Strides count elements as above, and the two caches have the same
// strides.
struct WriteKv {
  const void* key;  // [>= num_tokens, num_kv_heads, head_size]
  const void* value;
  void* key_cache;  // [num_blocks, page_size, num_kv_heads, head_size]
  void* value_cache;
  const long long* slot_mapping;  // [num_tokens]: block * page_size + row; negative: the token is skipped
  long long key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  long long block_stride, page_token_stride, page_head_stride;
  int page_size, num_kv_heads, head_size;
  float key_scale, value_scale;  // divisors, if keys and values are stored in 8 bits
};

// Keys per part of a sequence in the decode kernels: 128 times a power of two, or one and a half times as many. Long
// parts are read faster; more parts keep more SMs busy. Parts grow up to 1024 keys while at least min_parts of them
// remain, and further only to keep their number at or below 64. With min_parts, a sequence has 64 blocks of threads. If
// parts one and a half times as long give it 60 to 80 blocks, they are used, because shorter ones would give two blocks
// to some of the 80 SMs and one to the others. The length depends on the sequence and the model alone, so results do
// not depend on the batch.
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
