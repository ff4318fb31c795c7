// What was found by measuring, as data: register tile shapes and the points where one method overtakes another.
// `fastattention bench cpu` is the instrument.
#ifndef FASTATTENTION_TUNING_H
#define FASTATTENTION_TUNING_H

namespace fastattention {

struct Tuning {
  // Items of more query rows read, and pack, K and V less often. See KernelTable.
  int row_block_elements;
  int kv_tile;  // KV tokens of a first-level tile: packed, it should stay in the L2 cache
  // Packed panels: rows x vectors of accumulators, and operands, must fit the registers.
  int panel_rows;
  int panel_vectors;
  // The same where K and V are read as they lie, up to kv_tile: the shorter, the fewer pages are being read and fetched
  // at the same time.
  int direct_tile;
  int amx_direct_tile;  // with 9 to 16 rows; twice that with fewer
  int amx_split_tile;   // with up to 8 rows; twice that with more
  // Direct panels: rows at once (a power of two up to the vector width), and accumulators for the values.
  int direct_rows;
  int direct_accumulators;
  // Up to this many query rows, and with just direct_rows of them, the direct panels are faster; for fp32 arithmetic
  // and for bf16 panels.
  int max_direct_rows;
  int max_direct_rows_bf16;
  // Up to this many query rows fp32 is faster for fp16 than two bf16 on AMX: where the head size is a multiple of 32
  // and K and V are parted as they lie, and where it is not and they have to be packed.
  int max_fma_rows_split;
  int max_fma_rows_split_packed;
  // Up to this many query rows a cache in bf16 is read in pairs, where the vectors can.
  int max_pair_rows;
  // Up to this many query rows transposing K alone is faster than packing, and with K in pairs of bf16.
  int max_transposed_k_rows;
  int max_transposed_k_rows_pairs;
  // Up to this many query rows AMX reads K and V in bf16 as they lie in memory; more make packing them worth while.
  int max_amx_direct_rows;
  // The same in fp16.
  int max_amx_split_rows;
};

constexpr Tuning kTuningAvx512 = {0, 128, 12, 2, 64, 0, 0, 8, 16, 6, 6, 0, 0, 4, 40, 64, 0, 0};
constexpr Tuning kTuningAvx512Bf16 = {0, 128, 12, 2, 64, 0, 0, 8, 16, 6, 4, 0, 0, 4, 40, 64, 0, 0};
constexpr Tuning kTuningAmx = {128 * 1024, 256, 12, 2, 64, 32, 64, 8, 16, 6, 2, 6, 32, 4, 40, 64, 64, 48};
constexpr Tuning kTuningAvx2 = {0, 128, 6, 2, 128, 0, 0, 4, 8, 16, 16, 0, 0, 0, 32, 0, 0, 0};
constexpr Tuning kTuningNeon = {0, 128, 6, 4, 128, 0, 0, 4, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0};
constexpr Tuning kTuningScalar = {0, 128, 4, 2, 128, 0, 0, 4, 4, 16, 16, 0, 0, 0, 0, 0, 0, 0};

}  // namespace fastattention

#endif
