// Definitions that the planner, the C interface and the kernels share. This header is compiled under several -m flags,
// so it holds plain data only. Any function here must be static; otherwise the linker could keep its AVX-512 copy for
// all.
#ifndef FASTATTENTION_KERNEL_H
#define FASTATTENTION_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include "fastattention_cpu.h"

// Register tiles are arrays of vectors. They stay in registers only if every loop over them is unrolled.
#define FA_UNROLL _Pragma("GCC unroll 16")

namespace fastattention {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
// The OCP 8-bit floating-point formats, one byte each, which occur only in the KV cache.
struct Float8E4M3 {  // 1-4-3, bias 7; no infinity, NaN is 0x7f and 0xff
  uint8_t bits;
};
struct Float8E5M2 {  // 1-5-2, bias 15: the upper byte of a Half
  uint8_t bits;
};

// In the KV cache only. What it stands for is its value times the factor of its row, which is stored separately.
struct Int8 {
  int8_t value;
};

// Query rows of a work item, unless the instruction set and the problem ask for more. Splits are whole multiples of
// kKvBlock KV tokens. The number of KV tokens in a tile depends on the instruction set; see tuning.h.
constexpr int kRowBlock = 256;
constexpr int kKvBlock = 128;

constexpr int kMaxHeadSize = 256;
constexpr int kMaxSplits = 512;

// Consecutive query tokens of one sequence, with all query heads of one KV head, and the KV positions [kv_begin,
// kv_end). Row r of the item is token first_token + r / group and query head kv_head * group + r % group.
struct WorkItem {
  int32_t seq;
  int32_t kv_head;
  int32_t first_token;  // within the sequence
  int32_t num_tokens;
  int64_t kv_begin;
  int64_t kv_end;
  float* partial;  // receives the partial result, see partial_floats(); nullptr: write out and lse
};

// A partial result: unnormalised output [rows][head_size], then the running maximum [rows] and the sum [rows].
static inline size_t partial_floats(int rows, int head_size) { return static_cast<size_t>(rows) * (head_size + 2); }

// Some value heads of one key head, for all tokens of one request.
struct DeltaItem {
  int32_t request;
  int32_t first_head;
  int32_t num_heads;
};

// A token of a row of logits with its score. The largest score is sampled.
struct Candidate {
  float score;
  int32_t token;
};

// A linear layer is cut into items of some rows of the weight, with all tokens if they are few, otherwise with
// kLinearTokens of them. Their fp32 inputs of a part of the weight stay in L2.
constexpr int kMaxLinearRows = 96;
constexpr int kLinearTokens = 96;

struct LinearKernels {
  int few_tokens;        // up to this many are few
  int rows;              // of an item with many tokens
  size_t scratch_bytes;  // of such an item
  // What arrange() writes: the inputs in fp32. Many tokens can be arranged in ranges, few only all at once.
  size_t (*arranged_floats)(const fa_linear& problem);
  void (*arrange)(const fa_linear& problem, float* arranged, int64_t token_begin, int64_t token_end);
  void (*few)(const fa_linear& problem, const float* arranged, int row_begin, int row_end);
  void (*many)(const fa_linear& problem, const float* arranged, int64_t first_token, int first_row, void* scratch);
};

struct KernelTable {
  const char* name;
  // For bf16 or fp16 operands, items grow up to this many query rows times head size. 0: kRowBlock rows are enough.
  int64_t row_block_elements;
  size_t (*scratch_bytes)(int rows, int head_size);
  // following: the item that this thread computes next, or null if not known. Its first K and V are prefetched at the
  // end of this item.
  void (*attend)(const fa_attention_problem& problem, const WorkItem& item, const WorkItem* following, void* scratch);
  // Merges num_splits consecutive partial results in this order. item.partial points to the first.
  void (*merge)(const fa_attention_problem& problem, const WorkItem& item, int num_splits);
  void (*write_kv)(const fa_kv_write& write, int64_t token_begin, int64_t token_end);
  size_t (*delta_scratch_bytes)(const fa_gated_delta& problem, int num_heads);
  void (*gated_delta)(const fa_gated_delta& problem, const DeltaItem& item, void* scratch);
  // Writes the convolution's last inputs of the channels [begin, end) into the request's slot, after all of its items.
  void (*keep_inputs)(const fa_gated_delta& problem, int request, int channel_begin, int channel_end);
  void (*gated_norm)(const fa_gated_norm& problem, int64_t row_begin, int64_t row_end);
  Candidate (*sample)(const fa_sampling& problem, int64_t row, int token_begin, int token_end);
  LinearKernels linear;
  void (*rotate)(const fa_rotary& problem, int64_t token_begin, int64_t token_end);
};

}  // namespace fastattention

#endif
