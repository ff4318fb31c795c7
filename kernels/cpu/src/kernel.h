// What the planner, the ABI and the per-instruction-set kernels share. This header is compiled under several -m flags,
// so it holds plain data only: any function here must be static, or the linker could keep the AVX-512 copy of it.
#ifndef FASTATTENTION_KERNEL_H
#define FASTATTENTION_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include "fastattention_cpu.h"

// Register tiles are arrays of vectors; they live in registers only once every loop over them is unrolled.
#define FA_UNROLL _Pragma("GCC unroll 16")

namespace fastattention {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
// The OCP 8-bit floats, as torch names them: one byte each, only ever in the KV cache.
struct Float8E4M3 {  // 1-4-3, bias 7; no infinity, NaN is 0x7f and 0xff
  uint8_t bits;
};
struct Float8E5M2 {  // 1-5-2, bias 15: the upper byte of a Half
  uint8_t bits;
};

// Query rows of a work item, where the instruction set and the problem do not ask for more; and the number of KV tokens
// that splits are whole multiples of. The KV tile that they meet is the instruction set's choice, see tuning.h.
constexpr int kRowBlock = 256;
constexpr int kKvBlock = 128;

constexpr int kMaxHeadSize = 256;
constexpr int kMaxSplits = 512;

// Consecutive query tokens of one sequence, all query heads of one KV head, against KV positions [kv_begin, kv_end).
// Row r of the item is token first_token + r / group, query head kv_head * group + r % group.
struct WorkItem {
  int32_t seq;
  int32_t kv_head;
  int32_t first_token;  // within the sequence
  int32_t num_tokens;
  int64_t kv_begin;
  int64_t kv_end;
  float* partial;  // unfinished result over this KV range, see partial_floats(); nullptr: write out and lse
};

// A partial result: unnormalised output [rows][head_size], then the running maximum [rows] and the sum [rows].
static inline size_t partial_floats(int rows, int head_size) { return static_cast<size_t>(rows) * (head_size + 2); }

struct KernelTable {
  const char* name;
  // With bf16 or fp16 operands: query rows times head size up to which larger items are better, 0: kRowBlock rows are
  // enough.
  int64_t row_block_elements;
  size_t (*scratch_bytes)(int rows, int head_size);
  // following: what this thread computes next, if that is known; its first K and V are fetched at the end of this item.
  void (*attend)(const fa_attention_problem& problem, const WorkItem& item, const WorkItem* following, void* scratch);
  // Joins num_splits partials lying one behind the other, in that order; item.partial points at the first.
  void (*merge)(const fa_attention_problem& problem, const WorkItem& item, int num_splits);
  void (*write_kv)(const fa_kv_write& write, int64_t token_begin, int64_t token_end);
};

}  // namespace fastattention

#endif
