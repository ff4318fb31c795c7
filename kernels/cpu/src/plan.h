// Cuts one call into work items. The plan is a pure function of the problem and the kernel, and a sequence's items
// depend on that sequence alone. Neither the number of threads nor the rest of the batch changes a single bit of a
// sequence's result.
#ifndef FASTATTENTION_PLAN_H
#define FASTATTENTION_PLAN_H

#include <vector>

#include "kernel.h"

namespace fastattention {

// A block of query rows and the KV range that some of them see, cut into num_splits pieces.
struct RowBlock {
  WorkItem item;  // a template for the items, with kv_head 0 and the whole KV range
  int32_t num_splits;
  size_t first_partial;  // index of the first float of the block's partial results, [kv_head][split]
  size_t partial_size;
  int64_t first_merge;  // one merge per KV head if num_splits > 1
};

// One split of one block. It becomes an item for each KV head.
struct Piece {
  int32_t block;
  int32_t split;
  int64_t cost;  // rows * tokens
};

struct Plan {
  std::vector<RowBlock> blocks;
  std::vector<Piece> pieces;  // the most expensive first, so that short ones are left at the end
  int64_t num_items = 0;      // item i is KV head i % num_kv_heads of piece i / num_kv_heads
  int64_t multiply_adds = 0;
  int64_t num_merges = 0;
  size_t partial_floats = 0;
  int max_rows = 0;
};

// The KV position at which piece `split` of the block begins. For split == num_splits, the end of the last piece.
int64_t split_begin(const RowBlock& block, int64_t split);

void make_plan(const fa_attention_problem& problem, const KernelTable& kernel, Plan& plan);

}  // namespace fastattention

#endif
