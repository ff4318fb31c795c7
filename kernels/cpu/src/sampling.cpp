// Cuts the sampling of rows into items for the thread pool.
#include <algorithm>
#include <vector>

#include "api_error.h"
#include "engine.h"
#include "isa.h"
#include "schedule_tuning.h"

namespace fastattention {

void Engine::sample(const fa_sampling& problem) {
  const std::unique_lock<std::mutex> lock = turn();
  const KernelTable& kernel = active_kernel();
  const int64_t pieces = (problem.vocabulary + kTokensPerSample - 1) / kTokensPerSample;
  std::vector<Candidate> candidates(static_cast<size_t>(problem.num_rows * pieces));
  run(problem.num_rows * pieces, false, [&](int64_t index, int) {
    const int begin = static_cast<int>(index % pieces) * kTokensPerSample;
    const int end = std::min(problem.vocabulary, begin + kTokensPerSample);
    candidates[static_cast<size_t>(index)] = kernel.sample(problem, index / pieces, begin, end);
  });
  for (int64_t row = 0; row < problem.num_rows; ++row) {
    Candidate best = candidates[static_cast<size_t>(row * pieces)];
    for (int64_t piece = 1; piece < pieces; ++piece) {
      const Candidate& next = candidates[static_cast<size_t>(row * pieces + piece)];
      const bool best_is_number = best.score == best.score;
      if (best_is_number && (next.score > best.score || next.score != next.score)) best = next;
    }
    problem.tokens[row] = best.token;
  }
}

}  // namespace fastattention

using namespace fastattention;

FA_EXPORT int32_t fa_cpu_sample(const fa_sampling* problem) {
  return guarded([&]() -> int32_t {
    if (problem == nullptr) return fail(FA_BAD_ARGUMENT, "problem must not be a null pointer.");
    const fa_sampling& p = *problem;
    if (p.num_rows < 0)
      return fail(FA_BAD_ARGUMENT, "num_rows must not be negative, but is %lld.", (long long)p.num_rows);
    if (p.vocabulary < 1) return fail(FA_BAD_ARGUMENT, "vocabulary must be at least 1, but is %d.", p.vocabulary);
    if (p.num_rows == 0) return FA_OK;
    FA_REQUIRE_POINTER(p, logits);
    FA_REQUIRE_POINTER(p, seeds);
    FA_REQUIRE_POINTER(p, tokens);
    Engine::get().sample(p);
    return FA_OK;
  });
}
