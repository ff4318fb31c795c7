// Prints how one request is cut: a line per item of KV head 0 with its first token, its tokens, and its KV range.
// Arguments: new tokens, KV tokens, query heads, KV heads, head size, keys in a window before a token (-1: all).
#include <stdio.h>
#include <stdlib.h>

#include "plan.h"

int main(int, char** argv) {
  const int new_tokens = atoi(argv[1]), kv_tokens = atoi(argv[2]);
  const int32_t starts[] = {0, new_tokens}, lengths[] = {kv_tokens};
  fa_attention_problem problem{};
  problem.num_seqs = 1;
  problem.num_heads = atoi(argv[3]);
  problem.num_kv_heads = atoi(argv[4]);
  problem.head_size = atoi(argv[5]);
  problem.dtype = problem.kv_dtype = FA_BF16;
  problem.causal = 1;
  problem.window_left = atoi(argv[6]);
  problem.window_right = -1;
  problem.query_start_loc = starts;
  problem.seq_lens = lengths;
  fastattention::KernelTable kernel{};
  kernel.row_block_elements = 128 * 1024;
  fastattention::Plan plan;
  fastattention::make_plan(problem, kernel, plan);
  for (const fastattention::Piece& piece : plan.pieces) {
    const fastattention::RowBlock& block = plan.blocks[static_cast<size_t>(piece.block)];
    printf("%d %d %lld %lld\n", block.item.first_token, block.item.num_tokens,
           static_cast<long long>(split_begin(block, piece.split)),
           static_cast<long long>(split_begin(block, piece.split + 1)));
  }
}
