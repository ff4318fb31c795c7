// What was found by measuring, as data: register tile shapes and the points where one method overtakes another.
// benchmarks/NOTES.md says how each was found.
#ifndef FASTATTENTION_TUNING_H
#define FASTATTENTION_TUNING_H

namespace fastattention {

struct Tuning {
  // Packed panels: rows x vectors of accumulators, and operands, must fit the registers.
  int panel_rows;
  int panel_vectors;
  // Direct panels: rows at once (a power of two up to the vector width), and accumulators for the values.
  int direct_rows;
  int direct_accumulators;
  // Up to this many query rows the direct panels are faster than packing; for fp32 arithmetic and for bf16 panels.
  int max_direct_rows;
  int max_direct_rows_bf16;
};

constexpr Tuning kTuningAvx512 = {12, 2, 8, 16, 16, 16};
constexpr Tuning kTuningAvx512Bf16 = {12, 2, 8, 16, 16, 4};
constexpr Tuning kTuningAmx = {12, 2, 8, 16, 16, 2};
constexpr Tuning kTuningAvx2 = {6, 2, 4, 8, 16, 16};
constexpr Tuning kTuningNeon = {6, 4, 4, 16, 16, 16};
constexpr Tuning kTuningScalar = {4, 2, 4, 4, 16, 16};

}  // namespace fastattention

#endif
