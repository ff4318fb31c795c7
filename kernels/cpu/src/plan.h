// How one call is cut into work items. A pure function of the problem and the kernel, and item by item of one sequence
// alone: the number of threads and the rest of the batch change neither the sizes nor, therefore, a single bit of the
// result.
#ifndef FASTATTENTION_PLAN_H
#define FASTATTENTION_PLAN_H

#include <vector>

#include "kernel.h"

namespace fastattention {

// A block of query rows against the KV range that some of them see, cut into num_splits pieces.
struct RowBlock {
  WorkItem item;  // kv_head 0 and the whole KV range; the template of the items
  int32_t num_splits;
  size_t first_partial;  // in floats; the block's partials: [kv_head][split]
  size_t partial_size;
  int64_t first_merge;  // one merge per KV head if num_splits > 1
};

// One split of one block: an item for each KV head.
struct Piece {
  int32_t block;
  int32_t split;
  int64_t cost;  // rows * tokens
};

struct Plan {
  std::vector<RowBlock> blocks;
  std::vector<Piece> pieces;  // the costliest first, so that what is left at the end is short
  int64_t num_items = 0;      // item i is KV head i % num_kv_heads of piece i / num_kv_heads
  int64_t multiply_adds = 0;
  int64_t num_merges = 0;
  size_t partial_floats = 0;
  int max_rows = 0;
};

// Where piece `split` of the block begins; split == num_splits: where the last one ends.
int64_t split_begin(const RowBlock& block, int64_t split);

void make_plan(const fa_attention_problem& problem, const KernelTable& kernel, Plan& plan);

}  // namespace fastattention

#endif
