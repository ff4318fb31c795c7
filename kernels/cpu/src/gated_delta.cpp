// Cuts a call of the gated delta rule, or of the norm after it, into items for the thread pool.
#include <algorithm>
#include <vector>

#include "engine.h"
#include "isa.h"
#include "schedule_tuning.h"

namespace fastattention {

void Engine::gated_delta(const fa_gated_delta& problem) {
  const std::unique_lock<std::mutex> lock = turn();
  const KernelTable& kernel = active_kernel();
  const auto tokens = [&](int request) {
    return problem.query_start_loc[request + 1] - problem.query_start_loc[request];
  };
  std::vector<int32_t> requests;  // with tokens, the longest first
  for (int32_t r = 0; r < problem.num_requests; ++r) {
    if (tokens(r) > 0) requests.push_back(r);
  }
  std::stable_sort(requests.begin(), requests.end(), [&](int a, int b) { return tokens(a) > tokens(b); });
  const int64_t num_requests = static_cast<int64_t>(requests.size());
  const bool share = num_requests * problem.key_heads >= kDeltaItemsPerThread * num_threads_;
  const int heads = share ? problem.value_heads / problem.key_heads : 1;
  const int64_t per_request = problem.value_heads / heads;
  if (scratch_.size() < static_cast<size_t>(num_threads_)) scratch_.resize(num_threads_);
  for (int i = 0; i < num_threads_; ++i) scratch_[i].reserve(kernel.delta_scratch_bytes(problem, heads));

  int64_t multiply_adds = 0;
  for (const int32_t r : requests) multiply_adds += tokens(r);
  multiply_adds *= 3 * static_cast<int64_t>(problem.value_heads) * problem.key_size * problem.value_size;
  const auto compute = [&](int64_t index, int participant) {
    const int32_t first_head = static_cast<int32_t>(index % per_request) * heads;
    kernel.gated_delta(problem, {requests[index / per_request], first_head, heads}, scratch_[participant].data);
  };
  run(num_requests * per_request, multiply_adds < kPool.solo_multiply_adds, compute);

  // All items of a request have read the old inputs by now.
  const int channels = 2 * problem.key_heads * problem.key_size + problem.value_heads * problem.value_size;
  const int64_t blocks = (channels + kChannelsPerItem - 1) / kChannelsPerItem;
  const auto keep = [&](int64_t index, int) {
    const int begin = static_cast<int>(index % blocks) * kChannelsPerItem;
    kernel.keep_inputs(problem, requests[index / blocks], begin, std::min(channels, begin + kChannelsPerItem));
  };
  run(num_requests * blocks, multiply_adds < kPool.solo_multiply_adds, keep);
}

void Engine::gated_norm(const fa_gated_norm& problem) {
  const KernelTable& kernel = active_kernel();
  const int64_t rows = std::max<int64_t>(1, kElementsPerNorm / problem.size);
  if (problem.num_rows <= rows) {
    kernel.gated_norm(problem, 0, problem.num_rows);
    return;
  }
  const std::unique_lock<std::mutex> lock = turn();
  run((problem.num_rows + rows - 1) / rows, false, [&](int64_t index, int) {
    kernel.gated_norm(problem, index * rows, std::min(problem.num_rows, (index + 1) * rows));
  });
}

}  // namespace fastattention
