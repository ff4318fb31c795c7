// Cuts rotary position embedding into items for the thread pool.
#include <algorithm>

#include "api_error.h"
#include "engine.h"
#include "isa.h"
#include "schedule_tuning.h"

namespace fastattention {

void Engine::rotate(const fa_rotary& problem) {
  const KernelTable& kernel = active_kernel();
  const int64_t per_token = static_cast<int64_t>(problem.num_heads + problem.num_kv_heads) * problem.rotary_size;
  const int64_t tokens = std::max<int64_t>(1, kElementsPerRotation / std::max<int64_t>(1, per_token));
  if (problem.num_tokens <= tokens) {
    kernel.rotate(problem, 0, problem.num_tokens);
    return;
  }
  const std::unique_lock<std::mutex> lock = turn();
  run((problem.num_tokens + tokens - 1) / tokens, false, [&](int64_t index, int) {
    kernel.rotate(problem, index * tokens, std::min(problem.num_tokens, (index + 1) * tokens));
  });
}

}  // namespace fastattention

using namespace fastattention;

FA_EXPORT int32_t fa_cpu_rotate(const fa_rotary* problem) {
  return guarded([&]() -> int32_t {
    if (problem == nullptr) return fail(FA_BAD_ARGUMENT, "problem must not be a null pointer.");
    const fa_rotary& p = *problem;
    if (p.num_tokens < 0 || p.num_heads < 0 || p.num_kv_heads < 0)
      return fail(FA_BAD_ARGUMENT,
                  "num_tokens, num_heads and num_kv_heads must not be negative, but are %lld, %d and %d.",
                  (long long)p.num_tokens, p.num_heads, p.num_kv_heads);
    if (p.rotary_size < 2 || p.rotary_size % 2 != 0)
      return fail(FA_BAD_ARGUMENT, "rotary_size must be even and at least 2, but is %d.", p.rotary_size);
    if (p.first_dimension < 0 || p.head_size - p.first_dimension < p.rotary_size)
      return fail(FA_BAD_ARGUMENT, "a head of %d dimensions has no %d from dimension %d on.", p.head_size,
                  p.rotary_size, p.first_dimension);
    if (!is_wide(p.dtype) || !is_wide(p.cache_dtype))
      return fail(FA_BAD_ARGUMENT, "dtype and cache_dtype must be fp32, fp16 or bf16, but are %d and %d.", p.dtype,
                  p.cache_dtype);
    if (p.num_tokens == 0) return FA_OK;
    FA_REQUIRE_POINTER(p, positions);
    FA_REQUIRE_POINTER(p, cos_sin);
    FA_REQUIRE_POINTER(p, query);
    for (int64_t t = 0; t < p.num_tokens; ++t) {
      if (p.positions[t] < 0 || p.positions[t] >= p.num_positions)
        return fail(FA_BAD_ARGUMENT, "position %lld of token %lld is not in [0, %lld).", (long long)p.positions[t],
                    (long long)t, (long long)p.num_positions);
    }
    Engine::get().rotate(p);
    return FA_OK;
  });
}
