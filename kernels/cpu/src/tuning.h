// What was found by measuring, as data: register tile shapes and the points where one method overtakes another.
// `fastattention bench cpu` is the instrument.
#ifndef FASTATTENTION_TUNING_H
#define FASTATTENTION_TUNING_H

namespace fastattention {

// 0 where an instruction set has no such method.
struct Tuning {
  // Items of more query rows read, and pack, K and V less often. See KernelTable.
  int row_block_elements = 0;
  int kv_tile;  // KV tokens of a first-level tile: packed, it should stay in the L2 cache
  // Packed panels: rows x vectors of accumulators, and operands, must fit the registers.
  int panel_rows;
  int panel_vectors;
  // The same where K and V are read as they lie, up to kv_tile: the shorter, the fewer pages are being read and fetched
  // at the same time.
  int direct_tile;
  int amx_direct_tile = 0;  // with 9 to 16 rows; twice that with fewer
  int amx_split_tile = 0;   // with up to 8 rows; twice that with more
  // Direct panels: rows at once (a power of two up to the vector width), and accumulators for the values.
  int direct_rows;
  int direct_accumulators;
  // Up to this many query rows, and with just direct_rows of them, the direct panels are faster; for fp32 arithmetic
  // and for bf16 panels.
  int max_direct_rows;
  int max_direct_rows_bf16;
  // Up to this many query rows fp32 is faster for fp16 than two bf16 on AMX: where the head size is a multiple of 32
  // and K and V are parted as they lie, and where it is not and they have to be packed.
  int max_fma_rows_split = 0;
  int max_fma_rows_split_packed = 0;
  // Up to this many query rows a cache in bf16 is read in pairs, where the vectors can.
  int max_pair_rows = 0;
  // Up to this many query rows transposing K alone is faster than packing, and with K in pairs of bf16.
  int max_transposed_k_rows = 0;
  int max_transposed_k_rows_pairs = 0;
  // Up to this many query rows AMX reads K and V in bf16 as they lie in memory; more make packing them worth while.
  int max_amx_direct_rows = 0;
  // The same in fp16.
  int max_amx_split_rows = 0;
};

constexpr Tuning kTuningAvx512 = {
    .kv_tile = 128,
    .panel_rows = 12,
    .panel_vectors = 2,
    .direct_tile = 64,
    .direct_rows = 8,
    .direct_accumulators = 16,
    .max_direct_rows = 6,
    .max_direct_rows_bf16 = 6,
    .max_pair_rows = 4,
    .max_transposed_k_rows = 40,
    .max_transposed_k_rows_pairs = 64,
};
constexpr Tuning kTuningAvx512Bf16 = {
    .kv_tile = 128,
    .panel_rows = 12,
    .panel_vectors = 2,
    .direct_tile = 64,
    .direct_rows = 8,
    .direct_accumulators = 16,
    .max_direct_rows = 6,
    .max_direct_rows_bf16 = 4,
    .max_pair_rows = 4,
    .max_transposed_k_rows = 40,
    .max_transposed_k_rows_pairs = 64,
};
constexpr Tuning kTuningAmx = {
    .row_block_elements = 128 * 1024,
    .kv_tile = 256,
    .panel_rows = 12,
    .panel_vectors = 2,
    .direct_tile = 64,
    .amx_direct_tile = 32,
    .amx_split_tile = 64,
    .direct_rows = 8,
    .direct_accumulators = 16,
    .max_direct_rows = 6,
    .max_direct_rows_bf16 = 2,
    .max_fma_rows_split = 6,
    .max_fma_rows_split_packed = 32,
    .max_pair_rows = 4,
    .max_transposed_k_rows = 40,
    .max_transposed_k_rows_pairs = 64,
    .max_amx_direct_rows = 64,
    .max_amx_split_rows = 48,
};
constexpr Tuning kTuningAvx2 = {
    .kv_tile = 128,
    .panel_rows = 6,
    .panel_vectors = 2,
    .direct_tile = 128,
    .direct_rows = 4,
    .direct_accumulators = 8,
    .max_direct_rows = 16,
    .max_direct_rows_bf16 = 16,
    .max_transposed_k_rows = 32,
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
};

}  // namespace fastattention

#endif
