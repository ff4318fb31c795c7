// Constants found by measurement: the shapes of register tiles, and the row counts at which one method becomes faster
// than another. `fastattention bench cpu` measures them.
#ifndef FASTATTENTION_TUNING_H
#define FASTATTENTION_TUNING_H

namespace fastattention {

// A limit is 0 where an instruction set lacks the method. "Up to this many query rows" is meant per work item.
struct Tuning {
  // Larger items read and pack K and V less often. See KernelTable.
  int row_block_elements = 0;
  int kv_tile;  // KV tokens of a first-level tile, which should fit the L2 cache when packed
  // Packed panels: the accumulators, rows x vectors, must fit the registers together with the operands.
  int panel_rows;
  int panel_vectors;
  // KV tokens of a tile where K and V are read without packing, at most kv_tile. Shorter tiles mean fewer pages that
  // are read and prefetched at the same time.
  int direct_tile;
  int amx_direct_tile = 0;  // for 9 to 16 rows; twice that for fewer
  int amx_split_tile = 0;   // for up to 8 rows; twice that for more
  int amx_bytes_tile = 0;   // for up to 16 rows; twice that for more
  // Direct panels: rows per pass (a power of two, at most the vector width), and accumulators for the values.
  int direct_rows;
  int direct_accumulators;
  // Transposed K: rows per pass, and accumulators for the values.
  int transposed_rows = 8;
  int transposed_accumulators = 16;
  // Direct panels are faster up to this many query rows, and with exactly whole_direct_rows rows unless the cache is
  // fp8. The first limit is for fp32 arithmetic, the second for bf16 panels.
  int max_direct_rows;
  int whole_direct_rows = 0;
  int max_direct_rows_bf16;
  // Up to this many bf16 query rows over a bf16 cache, dot products take K and V as they lie. V of a tile should fit
  // L1, so tiles have twice as many tokens up to dot_tile_head_size.
  int max_dot_rows = 0;
  int dot_tile = 0;
  int dot_tile_head_size = 0;
  // Where V in 16 bits is read in place, its rows are fetched from L2 into L1 during the softmax: Zen 4 is slow to
  // fetch lines that came from memory and are read a part of each row at a time. Direct panels gain by it up to
  // max_short_tile_rows rows, for which tiles have one column step only. With more rows, multiply-adds are the limit.
  bool values_into_l1 = false;
  int max_short_tile_rows = 0;
  // With fp16 operands, fp32 arithmetic is faster than AMX on two bf16 parts up to this many query rows. The first
  // limit is for head sizes that are a multiple of 32, where K and V are split without packing; the second for other
  // head sizes, where they are packed.
  int max_fma_rows_split = 0;
  int max_fma_rows_split_packed = 0;
  // Up to this many query rows a bf16 cache is read in pairs, if the instruction set can. With exactly
  // unpaired_rows rows it is not.
  int max_pair_rows = 0;
  int unpaired_rows = 0;
  // Up to this many query rows it is faster to transpose only K than to pack the tile. The second limit is for fp8,
  // whose values are slow to widen for one group of rows after another, the third for K in pairs of bf16.
  int max_transposed_k_rows = 0;
  int max_transposed_k_rows_fp8 = 0;
  int max_transposed_k_rows_pairs = 0;
  // Up to this many query rows AMX reads K and V in bf16 without packing. With more rows packing pays off.
  int max_amx_direct_rows = 0;
  // The same limit for fp16.
  int max_amx_split_rows = 0;
  // With bf16 queries over an int8 cache, fp32 arithmetic is faster than AMX up to this many query rows. Over fp8, AMX
  // is as fast or faster with any number.
  int max_fma_rows_int8 = 0;
  // Up to this many bf16 query rows AMX reads an 8-bit cache without packing.
  int max_amx_bytes_rows = 0;
  // Linear layers: up to this many tokens the weight is streamed, with this many sums in registers.
  int linear_few_tokens;
  int linear_sums;
};

constexpr Tuning kTuningAvx512 = {
    .kv_tile = 128,
    .panel_rows = 12,
    .panel_vectors = 2,
    .direct_tile = 64,
    .direct_rows = 8,
    .direct_accumulators = 16,
    .max_direct_rows = 6,
    .whole_direct_rows = 8,
    .max_direct_rows_bf16 = 6,
    .max_pair_rows = 4,
    .max_transposed_k_rows = 40,
    .max_transposed_k_rows_fp8 = 40,
    .max_transposed_k_rows_pairs = 64,
    .linear_few_tokens = 16,
    .linear_sums = 24,
};
constexpr Tuning kTuningAvx512Bf16 = {
    .kv_tile = 128,
    .panel_rows = 12,
    .panel_vectors = 2,
    .direct_tile = 64,
    .direct_rows = 8,
    .direct_accumulators = 16,
    .max_direct_rows = 6,
    .whole_direct_rows = 8,
    .max_direct_rows_bf16 = 4,
    .max_dot_rows = 48,
    .dot_tile = 32,
    .dot_tile_head_size = 64,
    .values_into_l1 = true,
    .max_short_tile_rows = 2,
    .max_pair_rows = 4,
    .max_transposed_k_rows = 40,
    .max_transposed_k_rows_fp8 = 40,
    .max_transposed_k_rows_pairs = 64,
    .linear_few_tokens = 16,
    .linear_sums = 24,
};
constexpr Tuning kTuningAmx = {
    .row_block_elements = 128 * 1024,
    .kv_tile = 256,
    .panel_rows = 12,
    .panel_vectors = 2,
    .direct_tile = 64,
    .amx_direct_tile = 32,
    .amx_split_tile = 64,
    .amx_bytes_tile = 128,
    .direct_rows = 8,
    .direct_accumulators = 16,
    .max_direct_rows = 6,
    .whole_direct_rows = 8,
    .max_direct_rows_bf16 = 2,
    .max_fma_rows_split = 6,
    .max_fma_rows_split_packed = 32,
    .max_pair_rows = 4,
    .max_transposed_k_rows = 40,
    .max_transposed_k_rows_fp8 = 40,
    .max_transposed_k_rows_pairs = 64,
    .max_amx_direct_rows = 64,
    .max_amx_split_rows = 48,
    .max_fma_rows_int8 = 4,
    .max_amx_bytes_rows = 128,
    .linear_few_tokens = 16,
    .linear_sums = 24,
};
constexpr Tuning kTuningAvx2 = {
    .kv_tile = 128,
    .panel_rows = 6,
    .panel_vectors = 2,
    .direct_tile = 128,
    .direct_rows = 4,
    .direct_accumulators = 8,
    .transposed_rows = 6,
    .transposed_accumulators = 12,
    .max_direct_rows = 4,
    .whole_direct_rows = 8,
    .max_direct_rows_bf16 = 16,
    .max_pair_rows = 3,
    .unpaired_rows = 4,
    .max_transposed_k_rows = 32,
    .max_transposed_k_rows_fp8 = 8,
    .max_transposed_k_rows_pairs = 32,
    .linear_few_tokens = 16,
    .linear_sums = 12,
};
constexpr Tuning kTuningNeon = {
    .kv_tile = 128,
    .panel_rows = 6,
    .panel_vectors = 4,
    .direct_tile = 128,
    .direct_rows = 4,
    .direct_accumulators = 16,
    .max_direct_rows = 16,
    .max_direct_rows_bf16 = 16,
    .linear_few_tokens = 12,
    .linear_sums = 24,
};
constexpr Tuning kTuningScalar = {
    .kv_tile = 128,
    .panel_rows = 4,
    .panel_vectors = 2,
    .direct_tile = 128,
    .direct_rows = 4,
    .direct_accumulators = 4,
    .max_direct_rows = 16,
    .max_direct_rows_bf16 = 16,
    .linear_few_tokens = 12,
    .linear_sums = 4,
};

}  // namespace fastattention

#endif
