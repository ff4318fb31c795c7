// The C interface of attention, threads, memory and measurements: checks all arguments.
#include <algorithm>
#include <cfloat>
#include <memory>
#include <string>
#include <vector>

#include "api_error.h"
#include "engine.h"
#include "fastattention_cpu.h"
#include "graph_calls.h"
#include "isa.h"
#include "memory.h"
#include "roofline_choice.h"
#include "waiting.h"

namespace fastattention {
namespace {

constexpr int kMaxThreads = 4096;
constexpr int kMaxSpin = 1000000;
constexpr int kMaxCpus = 1 << 18;
constexpr int kMaxPrefetchBytes = 1 << 20;
constexpr int64_t kMaxPeakIterations = int64_t{1} << 40;

bool is_fp8(int32_t dtype) { return dtype == FA_F8_E4M3 || dtype == FA_F8_E5M2; }

// Checks that attention and write_kv share. Each returns FA_OK, or the status of a failure that it has recorded.
int32_t check_heads_and_dtypes(int32_t num_kv_heads, int32_t head_size, int32_t dtype, int32_t kv_dtype) {
  if (num_kv_heads <= 0) return fail(FA_BAD_ARGUMENT, "num_kv_heads must be positive, not %d.", num_kv_heads);
  if (head_size <= 0 || head_size % 8 != 0 || head_size > kMaxHeadSize) {
    return fail(FA_BAD_ARGUMENT, "head_size must be a multiple of 8 up to %d, not %d.", kMaxHeadSize, head_size);
  }
  if (!is_wide(dtype)) return fail(FA_BAD_ARGUMENT, "dtype must be 0 (fp32), 1 (fp16) or 2 (bf16), not %d.", dtype);
  if (!is_wide(kv_dtype) && !is_fp8(kv_dtype) && kv_dtype != FA_I8) {
    return fail(FA_BAD_ARGUMENT,
                "kv_dtype must be 0 (fp32), 1 (fp16), 2 (bf16), 3 (fp8 e4m3), 4 (fp8 e5m2) or 5 (int8), not %d.",
                kv_dtype);
  }
  return FA_OK;
}

template <class Arguments>
int32_t check_factors(const Arguments& a) {
  const bool wanted = a.kv_dtype == FA_I8;
  if ((a.key_factors != nullptr) == wanted && (a.value_factors != nullptr) == wanted) return FA_OK;
  return fail(FA_BAD_ARGUMENT, wanted ? "key_factors and value_factors must not be null pointers if K and V are int8."
                                      : "key_factors and value_factors must be null pointers unless K and V are int8.");
}

int32_t check_scale(const char* name, float scale, int32_t kv_dtype) {
  if (!(scale > 0.0f) || scale > FLT_MAX) {
    return fail(FA_BAD_ARGUMENT, "%s must be positive and finite, not %g.", name, (double)scale);
  }
  if (scale != 1.0f && !is_fp8(kv_dtype)) {
    return fail(FA_BAD_ARGUMENT, "%s must be 1 unless K and V are fp8, not %g.", name, (double)scale);
  }
  return FA_OK;
}

// fa_attention_problem and fa_kv_write have the same names for these fields.
template <class Arguments>
int32_t check_scales(const Arguments& a) {
  if (const int32_t status = check_scale("key_scale", a.key_scale, a.kv_dtype)) return status;
  return check_scale("value_scale", a.value_scale, a.kv_dtype);
}

int32_t check_sequences(const fa_attention_problem& p) {
  if (p.query_start_loc[0] != 0) {
    return fail(FA_BAD_ARGUMENT, "query_start_loc must begin with 0, not %d.", p.query_start_loc[0]);
  }
  for (int s = 0; s < p.num_seqs; ++s) {
    if (p.query_start_loc[s + 1] < p.query_start_loc[s]) {
      return fail(FA_BAD_ARGUMENT, "query_start_loc must never decrease, but sequence %d goes from %d to %d.", s,
                  p.query_start_loc[s], p.query_start_loc[s + 1]);
    }
    const int32_t q_len = p.query_start_loc[s + 1] - p.query_start_loc[s];
    const int64_t kv_len = p.seq_lens[s];
    if (kv_len < 0) {
      return fail(FA_BAD_ARGUMENT, "seq_lens[%d] must not be negative, but is %lld.", s, (long long)kv_len);
    }
    if (q_len == 0 || kv_len == 0) continue;
    FA_REQUIRE_POINTER(p, key);
    FA_REQUIRE_POINTER(p, value);
    if (const int32_t status = check_factors(p)) return status;
    if (p.block_table == nullptr) {
      const int64_t first = p.kv_start_loc[s];
      if (first < 0 || first + kv_len > p.num_blocks) {
        return fail(FA_BAD_ARGUMENT, "sequence %d uses key rows [%lld, %lld), but there are only %lld rows.", s,
                    (long long)first, (long long)(first + kv_len), (long long)p.num_blocks);
      }
      continue;
    }
    // Only pages that are read are checked. vLLM leaves stale numbers in the entries of pages that left the window.
    const int64_t position = kv_len - q_len;
    const int64_t begin = p.window_left < 0 || position < p.window_left ? 0 : position - p.window_left;
    const int64_t first_page = begin / p.page_size;
    const int64_t end_page = (kv_len + p.page_size - 1) / p.page_size;
    if (end_page > p.block_table_width) {
      return fail(
          FA_BAD_ARGUMENT,
          "sequence %d has %lld KV tokens, which take %lld pages of %d tokens, but its block_table row has %lld.", s,
          (long long)kv_len, (long long)end_page, p.page_size, (long long)p.block_table_width);
    }
    const int32_t* pages = p.block_table + s * p.block_table_stride;
    for (int64_t page = first_page; page < end_page; ++page) {
      if (pages[page] < 0 || pages[page] >= p.num_blocks) {
        return fail(FA_BAD_ARGUMENT, "block_table[%d][%lld] is %d, but page numbers go from 0 to %lld.", s,
                    (long long)page, pages[page], (long long)p.num_blocks - 1);
      }
    }
  }
  if (p.query_start_loc[p.num_seqs] > p.num_tokens) {
    return fail(FA_BAD_ARGUMENT, "query_start_loc ends at %d, but there are only %lld query tokens.",
                p.query_start_loc[p.num_seqs], (long long)p.num_tokens);
  }
  return FA_OK;
}

int32_t check(const fa_attention_problem& p) {
  if (const int32_t status = check_heads_and_dtypes(p.num_kv_heads, p.head_size, p.dtype, p.kv_dtype)) return status;
  if (p.num_heads <= 0 || p.num_heads % p.num_kv_heads != 0) {
    return fail(FA_BAD_ARGUMENT, "num_heads must be a positive multiple of num_kv_heads (%d), not %d.", p.num_kv_heads,
                p.num_heads);
  }
  if (p.num_seqs < 0) return fail(FA_BAD_ARGUMENT, "num_seqs must not be negative, but is %d.", p.num_seqs);
  if (p.num_tokens < 0)
    return fail(FA_BAD_ARGUMENT, "num_tokens must not be negative, but is %lld.", (long long)p.num_tokens);
  if (p.window_left < -1) return fail(FA_BAD_ARGUMENT, "window_left must be -1 or more, not %d.", p.window_left);
  if (p.window_right < -1) return fail(FA_BAD_ARGUMENT, "window_right must be -1 or more, not %d.", p.window_right);
  if (!(p.softcap >= 0.0f)) return fail(FA_BAD_ARGUMENT, "softcap must be 0 or more, not %g.", (double)p.softcap);
  if (p.scale != p.scale) return fail(FA_BAD_ARGUMENT, "scale must be a number, not nan.");
  if (const int32_t status = check_scales(p)) return status;
  if (p.num_seqs == 0) return FA_OK;
  FA_REQUIRE_POINTER(p, query_start_loc);
  FA_REQUIRE_POINTER(p, seq_lens);
  if (p.block_table != nullptr) {
    if (p.page_size <= 0) return fail(FA_BAD_ARGUMENT, "page_size must be positive, not %d.", p.page_size);
  } else {
    FA_REQUIRE_POINTER(p, kv_start_loc);
  }
  if (p.query_start_loc[p.num_seqs] != 0) {  // empty tensors have null pointers
    FA_REQUIRE_POINTER(p, query);
    FA_REQUIRE_POINTER(p, out);
  }
  return check_sequences(p);
}

int32_t check(const fa_kv_write& w) {
  if (const int32_t status = check_heads_and_dtypes(w.num_kv_heads, w.head_size, w.dtype, w.kv_dtype)) return status;
  if (w.page_size <= 0) return fail(FA_BAD_ARGUMENT, "page_size must be positive, not %d.", w.page_size);
  if (const int32_t status = check_scales(w)) return status;
  if (w.num_tokens < 0)
    return fail(FA_BAD_ARGUMENT, "num_tokens must not be negative, but is %lld.", (long long)w.num_tokens);
  if (w.num_tokens == 0) return FA_OK;
  FA_REQUIRE_POINTER(w, slot_mapping);
  FA_REQUIRE_POINTER(w, key);
  FA_REQUIRE_POINTER(w, value);
  FA_REQUIRE_POINTER(w, key_cache);
  FA_REQUIRE_POINTER(w, value_cache);
  if (const int32_t status = check_factors(w)) return status;
  const int64_t slots = w.num_blocks * w.page_size;
  for (int64_t t = 0; t < w.num_tokens; ++t) {
    if (w.slot_mapping[t] >= slots) {
      return fail(FA_BAD_ARGUMENT, "slot_mapping[%lld] is %lld, but the cache has only %lld slots.", (long long)t,
                  (long long)w.slot_mapping[t], (long long)slots);
    }
  }
  return FA_OK;
}

std::vector<int> list(const int32_t* numbers, int32_t count) {
  return numbers == nullptr ? std::vector<int>() : std::vector<int>(numbers, numbers + std::max(0, count));
}

void zero_by_pool(void* address, int64_t bytes) { Engine::get().zero(address, bytes); }

}  // namespace
}  // namespace fastattention

using namespace fastattention;

FA_EXPORT int32_t fa_cpu_abi_version(void) { return FA_CPU_ABI_VERSION; }

FA_EXPORT const char* fa_cpu_last_error(void) { return last_error(); }

FA_EXPORT const char* fa_cpu_usable_isas(void) { return usable_isas(); }

FA_EXPORT const char* fa_cpu_isa(void) { return active_kernel().name; }

FA_EXPORT int32_t fa_cpu_set_isa(const char* name) {
  return guarded([&]() -> int32_t {
    if (name != nullptr && activate_kernel(name)) return FA_OK;
    return fail(FA_BAD_ARGUMENT, "instruction set %s is not usable on this machine; choose one of: %s.",
                name != nullptr ? name : "(null)", usable_isas());
  });
}

FA_EXPORT int32_t fa_cpu_num_threads(void) { return Engine::get().num_threads(); }

FA_EXPORT int32_t fa_cpu_set_num_threads(int32_t num_threads, const int32_t* cpus, int32_t num_cpus) {
  return guarded([&]() -> int32_t {
    if (num_threads < 1 || num_threads > kMaxThreads) {
      return fail(FA_BAD_ARGUMENT, "num_threads must be between 1 and %d, not %d.", kMaxThreads, num_threads);
    }
    const std::vector<int> named = list(cpus, num_cpus);
    for (const int cpu : named) {
      if (cpu < 0 || cpu >= kMaxCpus) return fail(FA_BAD_ARGUMENT, "cpus contains %d, which is not a CPU number.", cpu);
    }
    Engine::get().set_num_threads(num_threads, named);
    return FA_OK;
  });
}

FA_EXPORT int32_t fa_cpu_set_spin(int32_t microseconds) {
  return guarded([&]() -> int32_t {
    if (microseconds < 0 || microseconds > kMaxSpin) {
      return fail(FA_BAD_ARGUMENT, "microseconds must be between 0 and %d, not %d.", kMaxSpin, microseconds);
    }
    set_spin(microseconds);
    return FA_OK;
  });
}

FA_EXPORT int32_t fa_cpu_measure_wake(int64_t* nanoseconds) {
  return guarded([&]() -> int32_t {
    if (nanoseconds == nullptr) return fail(FA_BAD_ARGUMENT, "nanoseconds must not be a null pointer.");
    *nanoseconds = Engine::get().measure_wake();
    return FA_OK;
  });
}

FA_EXPORT int32_t fa_cpu_attention_start(const fa_attention_problem* problem) {
  return guarded([&]() -> int32_t {
    if (problem == nullptr) return fail(FA_BAD_ARGUMENT, "problem must not be a null pointer.");
    if (const int32_t status = check(*problem)) return status;
    Engine::get().start_attention(*problem);
    return FA_OK;
  });
}

FA_EXPORT int32_t fa_cpu_attention_finish(void) {
  return guarded([&]() -> int32_t {
    Engine::get().finish_attention();
    return FA_OK;
  });
}

FA_EXPORT int32_t fa_cpu_attention(const fa_attention_problem* problem) {
  const int32_t status = fa_cpu_attention_start(problem);
  return status == FA_OK ? fa_cpu_attention_finish() : status;
}

FA_EXPORT int32_t fa_cpu_write_kv(const fa_kv_write* write) {
  return guarded([&]() -> int32_t {
    if (write == nullptr) return fail(FA_BAD_ARGUMENT, "write must not be a null pointer.");
    if (const int32_t status = check(*write)) return status;
    if (write->num_tokens > 0) Engine::get().write_kv(*write);
    return FA_OK;
  });
}

FA_EXPORT int32_t fa_cpu_graph_open(int32_t cpu, fa_cpu_graph** graph, void** doorbell) {
  return guarded([&]() -> int32_t {
    if (graph == nullptr || doorbell == nullptr) {
      return fail(FA_BAD_ARGUMENT, "graph and doorbell must not be null pointers.");
    }
    if (cpu < -1 || cpu >= kMaxCpus) return fail(FA_BAD_ARGUMENT, "cpu is %d, which is not a CPU number.", cpu);
    auto calls = std::make_unique<GraphCalls>(cpu);
    *doorbell = calls->doorbell();
    *graph = reinterpret_cast<fa_cpu_graph*>(calls.release());
    return FA_OK;
  });
}

FA_EXPORT int32_t fa_cpu_graph_close(fa_cpu_graph* graph) {
  return guarded([&]() -> int32_t {
    delete reinterpret_cast<GraphCalls*>(graph);
    return FA_OK;
  });
}

FA_EXPORT int32_t fa_cpu_graph_add(fa_cpu_graph* graph, const fa_kv_write* write, const fa_attention_problem* problem,
                                   uint32_t* number) {
  return guarded([&]() -> int32_t {
    if (graph == nullptr || write == nullptr || problem == nullptr || number == nullptr) {
      return fail(FA_BAD_ARGUMENT, "graph, write, problem and number must not be null pointers.");
    }
    *number = reinterpret_cast<GraphCalls*>(graph)->add(*write, *problem);
    return FA_OK;
  });
}

FA_EXPORT int32_t fa_cpu_graph_wake(fa_cpu_graph* graph) {
  return guarded([&]() -> int32_t {
    if (graph == nullptr) return fail(FA_BAD_ARGUMENT, "graph must not be a null pointer.");
    reinterpret_cast<GraphCalls*>(graph)->wake();
    return FA_OK;
  });
}

FA_EXPORT int32_t fa_cpu_graph_count(const fa_cpu_graph* graph, fa_cpu_graph_counters* counters) {
  return guarded([&]() -> int32_t {
    if (graph == nullptr || counters == nullptr) {
      return fail(FA_BAD_ARGUMENT, "graph and counters must not be null pointers.");
    }
    *counters = reinterpret_cast<const GraphCalls*>(graph)->counters();
    return FA_OK;
  });
}

FA_EXPORT int32_t fa_cpu_place_memory(void* address, int64_t bytes, const int32_t* nodes, int32_t num_nodes,
                                      int32_t discard, fa_cpu_placement* achieved) {
  return guarded([&]() -> int32_t {
    if (address == nullptr || achieved == nullptr) {
      return fail(FA_BAD_ARGUMENT, "address and achieved must not be null pointers.");
    }
    if (bytes < 0) return fail(FA_BAD_ARGUMENT, "bytes must not be negative, but is %lld.", (long long)bytes);
    *achieved = place_memory(address, bytes, list(nodes, num_nodes), discard != 0 ? Zero(zero_by_pool) : Zero());
    return FA_OK;
  });
}

FA_EXPORT int32_t fa_cpu_read_pages(const void* const* pages, const int64_t* bytes, int64_t num_pages,
                                    int32_t prefetch_bytes, int32_t streams, uint64_t* checksum) {
  return guarded([&]() -> int32_t {
    if (num_pages < 0)
      return fail(FA_BAD_ARGUMENT, "num_pages must not be negative, but is %lld.", (long long)num_pages);
    if (prefetch_bytes < 0 || prefetch_bytes > kMaxPrefetchBytes) {
      return fail(FA_BAD_ARGUMENT, "prefetch_bytes must be between 0 and %d, not %d.", kMaxPrefetchBytes,
                  prefetch_bytes);
    }
    if (streams != 1 && streams != 2 && streams != 4) {
      return fail(FA_BAD_ARGUMENT, "streams must be 1, 2 or 4, not %d.", streams);
    }
    if (checksum == nullptr) return fail(FA_BAD_ARGUMENT, "checksum must not be a null pointer.");
    if (num_pages > 0 && (pages == nullptr || bytes == nullptr)) {
      return fail(FA_BAD_ARGUMENT, "%s must not be a null pointer.", pages == nullptr ? "pages" : "bytes");
    }
    for (int64_t page = 0; page < num_pages; ++page) {
      if (bytes[page] < 0 || bytes[page] % 8 != 0) {
        return fail(FA_BAD_ARGUMENT, "bytes[%lld] must be a multiple of 8, not %lld.", (long long)page,
                    (long long)bytes[page]);
      }
      if (pages[page] == nullptr) {
        return fail(FA_BAD_ARGUMENT, "pages[%lld] must not be a null pointer.", (long long)page);
      }
    }
    *checksum = Engine::get().read_pages(pages, bytes, num_pages, {prefetch_bytes, streams});
    return FA_OK;
  });
}

FA_EXPORT const char* fa_cpu_peak_kinds(void) { return usable_peak_names(); }

FA_EXPORT int32_t fa_cpu_peak(const char* kind, int64_t iterations, double* flops) {
  return guarded([&]() -> int32_t {
    if (flops == nullptr) return fail(FA_BAD_ARGUMENT, "flops must not be a null pointer.");
    if (iterations < 1 || iterations > kMaxPeakIterations) {
      return fail(FA_BAD_ARGUMENT, "iterations must be between 1 and %lld, not %lld.", (long long)kMaxPeakIterations,
                  (long long)iterations);
    }
    for (const PeakLoop* loop : usable_peaks()) {
      if (kind == nullptr || std::string(kind) != loop->name) continue;
      Engine::get().spin(*loop, iterations);
      *flops = static_cast<double>(iterations) * static_cast<double>(loop->flops_per_iteration);
      return FA_OK;
    }
    return fail(FA_BAD_ARGUMENT, "peak kind %s cannot be measured on this machine; choose one of: %s.",
                kind != nullptr ? kind : "(null)", usable_peak_names());
  });
}
