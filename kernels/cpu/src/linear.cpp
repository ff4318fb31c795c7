// Cuts linear layers into items for the thread pool.
#include <algorithm>

#include "api_error.h"
#include "engine.h"
#include "isa.h"
#include "schedule_tuning.h"

namespace fastattention {

void Engine::linear(const fa_linear& problem) {
  const std::unique_lock<std::mutex> lock = turn();
  const LinearKernels& kernel = active_kernel().linear;
  const int64_t tokens = problem.num_tokens;
  const int64_t multiply_adds = tokens * problem.in_features * problem.out_features;
  const bool alone = multiply_adds < kPool.solo_multiply_adds;
  arranged_.reserve(kernel.arranged_floats(problem) * sizeof(float));
  float* arranged = static_cast<float*>(arranged_.data);

  if (tokens <= kernel.few_tokens) {
    kernel.arrange(problem, arranged, 0, tokens);
    const int even = problem.out_features / (num_threads_ * kLinearItemsPerThread);
    const int rows = std::clamp(even / kLinearRows * kLinearRows, kLinearRows, kMaxLinearRows);
    run((problem.out_features + rows - 1) / rows, alone, [&](int64_t index, int) {
      const int begin = static_cast<int>(index) * rows;
      kernel.few(problem, arranged, begin, std::min(problem.out_features, begin + rows));
    });
    return;
  }
  if (scratch_.size() < static_cast<size_t>(num_threads_)) scratch_.resize(num_threads_);
  for (int i = 0; i < num_threads_; ++i) scratch_[i].reserve(kernel.scratch_bytes);
  run((tokens + kTokensPerArrangement - 1) / kTokensPerArrangement, alone, [&](int64_t index, int) {
    const int64_t begin = index * kTokensPerArrangement;
    kernel.arrange(problem, arranged, begin, std::min(tokens, begin + kTokensPerArrangement));
  });
  // Tokens are the inner index, so that the threads use the same rows of the weight at the same time.
  const int64_t groups = (tokens + kLinearTokens - 1) / kLinearTokens;
  const int64_t parts = (problem.out_features + kernel.rows - 1) / kernel.rows;
  run(parts * groups, alone, [&](int64_t index, int participant) {
    kernel.many(problem, arranged, index % groups * kLinearTokens, static_cast<int>(index / groups) * kernel.rows,
                scratch_[participant].data);
  });
}

}  // namespace fastattention

using namespace fastattention;

FA_EXPORT int32_t fa_cpu_linear(const fa_linear* problem) {
  return guarded([&]() -> int32_t {
    if (problem == nullptr) return fail(FA_BAD_ARGUMENT, "problem must not be a null pointer.");
    const fa_linear& p = *problem;
    if (p.num_tokens < 0)
      return fail(FA_BAD_ARGUMENT, "num_tokens must not be negative, but is %lld.", (long long)p.num_tokens);
    if (p.in_features < 1 || p.out_features < 1)
      return fail(FA_BAD_ARGUMENT, "in_features and out_features must be at least 1, but are %d and %d.", p.in_features,
                  p.out_features);
    if (!is_wide(p.dtype)) return fail(FA_BAD_ARGUMENT, "dtype must be fp32, fp16 or bf16, but is %d.", p.dtype);
    if (p.num_tokens == 0) return FA_OK;
    FA_REQUIRE_POINTER(p, x);
    FA_REQUIRE_POINTER(p, weight);
    FA_REQUIRE_POINTER(p, y);
    Engine::get().linear(p);
    return FA_OK;
  });
}
