#include "plan.h"

#include <algorithm>

namespace fastattention {
namespace {

// One sequence alone should keep a large machine busy, but a split costs a partial result of (rows * head_size) floats
// written and read again: small against the K and V of this many tokens.
constexpr int64_t kItemsPerSequence = 512;
constexpr int64_t kMinSplitTokens = 512;
constexpr int64_t kMinSplitTokensPerRow = 32;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

const RowBlock& Plan::block_of(int64_t item) const {
  const auto after = std::upper_bound(blocks.begin(), blocks.end(), item,
                                      [](int64_t value, const RowBlock& block) { return value < block.first_item; });
  return *(after - 1);
}

void make_plan(const fa_attention_problem& problem, Plan& plan) {
  plan.blocks.clear();
  plan.num_items = 0;
  plan.num_merges = 0;
  plan.partial_floats = 0;
  plan.max_rows = 0;
  const int group = problem.num_heads / problem.num_kv_heads;
  const int tokens_per_block = std::max(1, kRowBlock / group);

  for (int seq = 0; seq < problem.num_seqs; ++seq) {
    const int q_len = problem.query_start_loc[seq + 1] - problem.query_start_loc[seq];
    const int64_t kv_len = problem.seq_lens[seq];
    const int64_t blocks_of_sequence = ceil_div(q_len, tokens_per_block);
    const int64_t wanted_splits =
        ceil_div(kItemsPerSequence, std::max<int64_t>(1, blocks_of_sequence * problem.num_kv_heads));
    for (int first = 0; first < q_len; first += tokens_per_block) {
      RowBlock block{};
      WorkItem& item = block.item;
      item.seq = seq;
      item.first_token = first;
      item.num_tokens = std::min(tokens_per_block, q_len - first);
      const int rows = item.num_tokens * group;

      // KV positions that some row of the block sees: everything else is neither read nor counted as work.
      const int64_t first_position = kv_len - q_len + first;
      const int64_t last_position = first_position + item.num_tokens - 1;
      const int64_t right = problem.causal ? 0 : problem.window_right;
      item.kv_begin = problem.window_left < 0 ? 0 : std::max<int64_t>(0, first_position - problem.window_left);
      item.kv_end = right < 0 ? kv_len : std::clamp<int64_t>(last_position + right + 1, 0, kv_len);
      item.kv_begin = std::min(item.kv_begin, item.kv_end);

      const int64_t length = item.kv_end - item.kv_begin;
      const int64_t shortest = std::max(kMinSplitTokens, kMinSplitTokensPerRow * rows);
      const int64_t split_len = std::max(shortest, ceil_div(length, wanted_splits));
      block.split_len = ceil_div(split_len, kKvBlock) * kKvBlock;
      block.num_splits = static_cast<int32_t>(std::max<int64_t>(1, ceil_div(length, block.split_len)));
      block.partial_size = partial_floats(rows, problem.head_size);
      plan.max_rows = std::max(plan.max_rows, rows);
      plan.blocks.push_back(block);
    }
  }

  const auto cost = [](const RowBlock& block) {
    return block.item.num_tokens * std::min(block.split_len, block.item.kv_end - block.item.kv_begin);
  };
  std::stable_sort(plan.blocks.begin(), plan.blocks.end(),
                   [&](const RowBlock& a, const RowBlock& b) { return cost(a) > cost(b); });
  for (RowBlock& block : plan.blocks) {
    block.first_item = plan.num_items;
    plan.num_items += static_cast<int64_t>(block.num_splits) * problem.num_kv_heads;
    if (block.num_splits == 1) continue;
    block.first_merge = plan.num_merges;
    plan.num_merges += problem.num_kv_heads;
    block.first_partial = plan.partial_floats;
    plan.partial_floats += block.partial_size * block.num_splits * problem.num_kv_heads;
  }
}

}  // namespace fastattention
