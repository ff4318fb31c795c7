// How one call is cut into work items. A pure function of the problem, and item by item of one sequence alone: the
// number of threads and the rest of the batch change neither the sizes nor, therefore, a single bit of the result.
#ifndef FASTATTENTION_PLAN_H
#define FASTATTENTION_PLAN_H

#include <vector>

#include "kernel.h"

namespace fastattention {

// A block of query rows; for each KV head, num_splits items, each over split_len KV tokens (the last may be shorter).
struct RowBlock {
  WorkItem item;  // kv_head 0 and the whole KV range; the template of the items
  int32_t num_splits;
  int64_t split_len;
  int64_t first_item;
  size_t first_partial;  // in floats; the block's partials: [kv_head][split]
  size_t partial_size;
  int64_t first_merge;  // one merge per KV head if num_splits > 1
};

struct Plan {
  std::vector<RowBlock> blocks;  // longest items first: what is left at the end is short
  int64_t num_items = 0;
  int64_t num_merges = 0;
  size_t partial_floats = 0;
  int max_rows = 0;

  const RowBlock& block_of(int64_t item) const;
};

void make_plan(const fa_attention_problem& problem, Plan& plan);

}  // namespace fastattention

#endif
