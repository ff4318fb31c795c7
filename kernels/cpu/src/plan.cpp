#include "plan.h"

#include <algorithm>

#include "schedule_tuning.h"

namespace fastattention {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows per item. They grow only as long as the sequence still has enough items.
int row_block(const fa_attention_problem& problem, const KernelTable& kernel, int64_t rows_of_sequence) {
  const bool sixteen_bits = problem.dtype == FA_BF16 || problem.dtype == FA_F16;
  const int64_t max_elements = sixteen_bits && problem.kv_dtype == problem.dtype ? kernel.row_block_elements : 0;
  int rows = kRowBlock;
  while (2 * int64_t{rows} * problem.head_size <= max_elements &&
         ceil_div(rows_of_sequence, 2 * rows) * problem.num_kv_heads >= kSplits.row_blocks_of_sequence) {
    rows *= 2;
  }
  return rows;
}

}  // namespace

// Pieces shrink linearly, from twice the mean length to one tile. Large first pieces keep the number of partial results
// small; small last pieces let all threads finish at about the same time. Split i ends where the first i of n steps of
// a falling staircase end.
int64_t split_begin(const RowBlock& block, int64_t split) {
  const int64_t n = block.num_splits;
  const int64_t tiles = ceil_div(block.item.kv_end - block.item.kv_begin, kKvBlock);
  const int64_t staircase = tiles * (2 * n - split) * split / (n * n);
  const int64_t one_tile_for_each_that_follows = tiles - (n - split);
  const int64_t tile = std::max<int64_t>(0, std::min(staircase, one_tile_for_each_that_follows));
  return std::min(block.item.kv_begin + tile * kKvBlock, block.item.kv_end);
}

void make_plan(const fa_attention_problem& problem, const KernelTable& kernel, Plan& plan) {
  plan.blocks.clear();
  plan.pieces.clear();
  plan.multiply_adds = 0;
  plan.num_merges = 0;
  plan.partial_floats = 0;
  plan.max_rows = 0;
  const int group = problem.num_heads / problem.num_kv_heads;

  for (int seq = 0; seq < problem.num_seqs; ++seq) {
    const int q_len = problem.query_start_loc[seq + 1] - problem.query_start_loc[seq];
    const int64_t kv_len = problem.seq_lens[seq];
    const int tokens_per_block = std::max(1, row_block(problem, kernel, int64_t{q_len} * group) / group);
    const int64_t blocks_of_sequence = ceil_div(q_len, tokens_per_block);
    for (int first = 0; first < q_len; first += tokens_per_block) {
      RowBlock block{};
      WorkItem& item = block.item;
      item.seq = seq;
      item.first_token = first;
      item.num_tokens = std::min(tokens_per_block, q_len - first);
      const int rows = item.num_tokens * group;

      // KV positions that some row of the block sees. All others are neither read nor counted as work.
      const int64_t first_position = kv_len - q_len + first;
      const int64_t last_position = first_position + item.num_tokens - 1;
      const int64_t right = problem.causal ? 0 : problem.window_right;
      item.kv_begin = problem.window_left < 0 ? 0 : std::max<int64_t>(0, first_position - problem.window_left);
      item.kv_end = right < 0 ? kv_len : std::clamp<int64_t>(last_position + right + 1, 0, kv_len);
      item.kv_begin = std::min(item.kv_begin, item.kv_end);

      const int64_t length = item.kv_end - item.kv_begin;
      const int64_t items_unsplit = blocks_of_sequence * problem.num_kv_heads;
      const int64_t tokens =
          std::clamp(length / ceil_div(kSplits.few_items, items_unsplit), kSplits.min_tokens, kSplits.tokens);
      const int64_t shortest = std::max(tokens, kSplits.min_tokens_per_row * rows);
      const int64_t wanted_items = rows < kRowBlock ? kSplits.items_per_sequence : kSplits.large_items;
      const int64_t wanted_splits = ceil_div(wanted_items, items_unsplit);
      block.num_splits = static_cast<int32_t>(std::clamp<int64_t>(length / shortest, 1, wanted_splits));
      block.partial_size = partial_floats(rows, problem.head_size);
      plan.max_rows = std::max(plan.max_rows, rows);
      if (block.num_splits > 1) {
        block.first_merge = plan.num_merges;
        plan.num_merges += problem.num_kv_heads;
        block.first_partial = plan.partial_floats;
        plan.partial_floats += block.partial_size * block.num_splits * problem.num_kv_heads;
      }
      for (int split = 0; split < block.num_splits; ++split) {
        const int64_t tokens = split_begin(block, split + 1) - split_begin(block, split);
        plan.pieces.push_back({static_cast<int32_t>(plan.blocks.size()), split, tokens * rows});
      }
      plan.multiply_adds += 2 * length * rows * problem.head_size * problem.num_kv_heads;
      plan.blocks.push_back(block);
    }
  }

  std::stable_sort(plan.pieces.begin(), plan.pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.cost > b.cost; });
  plan.num_items = static_cast<int64_t>(plan.pieces.size()) * problem.num_kv_heads;
}

}  // namespace fastattention
