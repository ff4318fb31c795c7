// The C interface of Gated DeltaNet layers: checks all arguments.
#include "api_error.h"
#include "engine.h"
#include "fastattention_cpu.h"

namespace fastattention {
namespace {

int32_t check_dtype(const char* name, int32_t dtype) {
  if (is_wide(dtype)) return FA_OK;
  return fail(FA_BAD_ARGUMENT, "%s must be 0 (fp32), 1 (fp16) or 2 (bf16), not %d.", name, dtype);
}

int32_t check_size(const char* name, int32_t size) {
  if (size > 0 && size % 8 == 0 && size <= kMaxHeadSize) return FA_OK;
  return fail(FA_BAD_ARGUMENT, "%s must be a multiple of 8 up to %d, not %d.", name, kMaxHeadSize, size);
}

// A request's draft tokens: their states and inputs are inside its slots.
int32_t check_drafts(const fa_gated_delta& p, int r) {
  const int32_t verified = p.verified[r], tokens = p.query_start_loc[r + 1] - p.query_start_loc[r];
  if (verified == 0 || tokens == 0) return FA_OK;
  const int32_t most =
      p.states_per_request < p.inputs_per_slot - p.width + 2 ? p.states_per_request : p.inputs_per_slot - p.width + 2;
  if (verified < 0 || verified > most) {
    return fail(FA_BAD_ARGUMENT, "verified[%d] is %d, but slots keep states and inputs of 0 to %d tokens.", r, verified,
                most);
  }
  if (tokens > most) {
    return fail(FA_BAD_ARGUMENT, "request %d computes %d draft tokens, but slots keep states and inputs of %d.", r,
                tokens, most);
  }
  for (int32_t t = 0; t < (tokens > verified ? tokens : verified); ++t) {
    const int32_t slot = p.state_slots[static_cast<int64_t>(r) * p.states_per_request + t];
    if (slot < 0 || slot >= p.num_slots) {
      return fail(FA_BAD_ARGUMENT, "state_slots[%d][%d] is %d, but slots go from 0 to %lld.", r, t, slot,
                  (long long)p.num_slots - 1);
    }
  }
  return FA_OK;
}

int32_t check_requests(const fa_gated_delta& p) {
  if (p.query_start_loc[0] != 0) {
    return fail(FA_BAD_ARGUMENT, "query_start_loc must begin with 0, not %d.", p.query_start_loc[0]);
  }
  for (int r = 0; r < p.num_requests; ++r) {
    if (p.query_start_loc[r + 1] < p.query_start_loc[r]) {
      return fail(FA_BAD_ARGUMENT, "query_start_loc must never decrease, but request %d goes from %d to %d.", r,
                  p.query_start_loc[r], p.query_start_loc[r + 1]);
    }
    if (p.slots[r] < 0 || p.slots[r] >= p.num_slots) {
      return fail(FA_BAD_ARGUMENT, "slots[%d] is %d, but slots go from 0 to %lld.", r, p.slots[r],
                  (long long)p.num_slots - 1);
    }
    if (p.verified != nullptr) {
      if (const int32_t status = check_drafts(p, r)) return status;
    }
  }
  if (p.query_start_loc[p.num_requests] > p.num_tokens) {
    return fail(FA_BAD_ARGUMENT, "query_start_loc ends at %d, but there are only %lld tokens.",
                p.query_start_loc[p.num_requests], (long long)p.num_tokens);
  }
  return FA_OK;
}

int32_t check(const fa_gated_delta& p) {
  if (p.num_requests < 0) return fail(FA_BAD_ARGUMENT, "num_requests must not be negative, but is %d.", p.num_requests);
  if (p.key_heads <= 0) return fail(FA_BAD_ARGUMENT, "key_heads must be positive, not %d.", p.key_heads);
  if (p.value_heads <= 0 || p.value_heads % p.key_heads != 0) {
    return fail(FA_BAD_ARGUMENT, "value_heads must be a positive multiple of key_heads (%d), not %d.", p.key_heads,
                p.value_heads);
  }
  if (const int32_t status = check_size("key_size", p.key_size)) return status;
  if (const int32_t status = check_size("value_size", p.value_size)) return status;
  if (p.width < 2 || p.width > 4) return fail(FA_BAD_ARGUMENT, "width must be 2, 3 or 4, not %d.", p.width);
  if (const int32_t status = check_dtype("dtype", p.dtype)) return status;
  if (const int32_t status = check_dtype("inputs_dtype", p.inputs_dtype)) return status;
  if (const int32_t status = check_dtype("states_dtype", p.states_dtype)) return status;
  if (p.inputs_per_slot < p.width - 1) {
    return fail(FA_BAD_ARGUMENT, "inputs_per_slot must be at least width - 1 (%d), not %d.", p.width - 1,
                p.inputs_per_slot);
  }
  if (p.num_requests == 0) return FA_OK;
  if (p.verified != nullptr) FA_REQUIRE_POINTER(p, state_slots);
  FA_REQUIRE_POINTER(p, query_start_loc);
  FA_REQUIRE_POINTER(p, slots);
  FA_REQUIRE_POINTER(p, begun);
  if (const int32_t status = check_requests(p)) return status;
  if (p.query_start_loc[p.num_requests] == 0) return FA_OK;
  FA_REQUIRE_POINTER(p, weight);
  FA_REQUIRE_POINTER(p, a_log);
  FA_REQUIRE_POINTER(p, dt_bias);
  FA_REQUIRE_POINTER(p, x);
  FA_REQUIRE_POINTER(p, a);
  FA_REQUIRE_POINTER(p, b);
  FA_REQUIRE_POINTER(p, out);
  FA_REQUIRE_POINTER(p, inputs);
  FA_REQUIRE_POINTER(p, states);
  return FA_OK;
}

int32_t check(const fa_gated_norm& p) {
  if (p.num_rows < 0)
    return fail(FA_BAD_ARGUMENT, "num_rows must not be negative, but is %lld.", (long long)p.num_rows);
  if (const int32_t status = check_size("size", p.size)) return status;
  if (const int32_t status = check_dtype("dtype", p.dtype)) return status;
  if (!(p.epsilon >= 0.0f)) return fail(FA_BAD_ARGUMENT, "epsilon must be 0 or more, not %g.", (double)p.epsilon);
  if (p.num_rows == 0) return FA_OK;
  FA_REQUIRE_POINTER(p, weight);
  FA_REQUIRE_POINTER(p, x);
  FA_REQUIRE_POINTER(p, gate);
  FA_REQUIRE_POINTER(p, out);
  return FA_OK;
}

}  // namespace
}  // namespace fastattention

using namespace fastattention;

FA_EXPORT int32_t fa_cpu_gated_delta(const fa_gated_delta* problem) {
  return guarded([&]() -> int32_t {
    if (problem == nullptr) return fail(FA_BAD_ARGUMENT, "problem must not be a null pointer.");
    if (const int32_t status = check(*problem)) return status;
    Engine::get().gated_delta(*problem);
    return FA_OK;
  });
}

FA_EXPORT int32_t fa_cpu_gated_norm(const fa_gated_norm* problem) {
  return guarded([&]() -> int32_t {
    if (problem == nullptr) return fail(FA_BAD_ARGUMENT, "problem must not be a null pointer.");
    if (const int32_t status = check(*problem)) return status;
    if (problem->num_rows > 0) Engine::get().gated_norm(*problem);
    return FA_OK;
  });
}
