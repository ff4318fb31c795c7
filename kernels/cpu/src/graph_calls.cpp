#include "graph_calls.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>

#include "thread_pool.h"
#include "waiting.h"

namespace fastattention {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// After a step has been announced, its first call comes soon: the thread looks for it often, but leaves the CPU to
// others in between. Without an announcement, a call is late by at most kIdle.
constexpr microseconds kSoon{50}, kIdle{10000}, kAnnounced{1000000};

uint32_t load(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void store(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

// The device waits in the middle of a step, and nobody could use a wrong answer. So the process ends.
[[noreturn]] void stop_process(const char* reason) {
  std::fprintf(stderr, "fastattention: the host attention of a CUDA graph failed: %s The process ends.\n", reason);
  std::fflush(stderr);
  _exit(1);
}

int64_t kv_bytes(const fa_attention_problem& p) {
  static constexpr int64_t kBytes[] = {4, 2, 2, 1, 1, 1};
  int64_t tokens = 0;
  for (int s = 0; s < p.num_seqs; ++s) {
    const int64_t new_tokens = p.query_start_loc[s + 1] - p.query_start_loc[s];
    if (new_tokens == 0) continue;
    const int64_t all = p.seq_lens[s];
    tokens += p.window_left < 0 ? all : std::min(all, p.window_left + new_tokens);
  }
  const int64_t factor_bytes = p.kv_dtype == FA_I8 ? sizeof(float) : 0;
  return tokens * p.num_kv_heads * 2 * (p.head_size * kBytes[p.kv_dtype] + factor_bytes);
}

// A page that is never freed, because a device may have it registered, and a thread may poll it while the process
// exits.
uint32_t* new_doorbell() {
  static std::vector<void*>* const pages = new std::vector<void*>;  // so that leak checkers find them
  static std::mutex mutex;
  void* page = std::aligned_alloc(FA_CPU_DOORBELL_BYTES, FA_CPU_DOORBELL_BYTES);
  if (page == nullptr) throw std::bad_alloc();
  std::memset(page, 0, FA_CPU_DOORBELL_BYTES);
  madvise(page, FA_CPU_DOORBELL_BYTES, MADV_DONTFORK);  // a fork must not move the page that a device has registered
  const std::lock_guard<std::mutex> lock(mutex);
  pages->push_back(page);
  return static_cast<uint32_t*>(page);
}

}  // namespace

GraphCalls::GraphCalls(int cpu) : rung_(new_doorbell()), answered_(rung_ + FA_CPU_ANSWER_BYTES / sizeof(uint32_t)) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // Python's handlers expect signals on its main thread
  try {
    thread_ = std::thread(&GraphCalls::serve, this);
    if (cpu >= 0) pin(thread_, cpu);
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    closing_.store(true);
    if (thread_.joinable()) thread_.join();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

GraphCalls::~GraphCalls() {
  closing_.store(true);
  wake();
  thread_.join();
}

uint32_t GraphCalls::add(const fa_kv_write& write, const fa_attention_problem& problem) {
  const std::lock_guard<std::mutex> lock(mutex_);
  calls_.push_back({write, problem});
  return static_cast<uint32_t>(calls_.size());
}

void GraphCalls::wake() {
  wakes_.fetch_add(1);
  futex_wake(wakes_, 1);
}

fa_cpu_graph_counters GraphCalls::counters() const {
  return {served_.load(std::memory_order_relaxed), nanoseconds_.load(std::memory_order_relaxed),
          kv_bytes_.load(std::memory_order_relaxed)};
}

void GraphCalls::serve() {
  pthread_setname_np(pthread_self(), "fastattention");
  while (const uint32_t number = next_call()) {
    store(rung_, 0);  // before the answer, after which the device rings again
    run(number);
    store(answered_, number);
  }
}

uint32_t GraphCalls::next_call() {
  uint32_t seen = wakes_.load();
  auto announced = Clock::now();
  for (;;) {
    if (spin_until([&] { return load(rung_) != 0 || closing_.load(std::memory_order_relaxed); })) break;
    while (load(rung_) == 0 && !closing_.load() && wakes_.load() == seen) {
      futex_wait_for(wakes_, seen, Clock::now() - announced < kAnnounced ? kSoon : kIdle);
    }
    if (wakes_.load() != seen) {
      seen = wakes_.load();
      announced = Clock::now();
    }
  }
  return closing_.load() ? 0 : load(rung_);
}

void GraphCalls::run(uint32_t number) {
  const auto began = Clock::now();
  Call call;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (number > calls_.size()) stop_process("the device rang for a call that does not exist.");
    call = calls_[number - 1];
  }
  if (fa_cpu_write_kv(&call.write) != FA_OK || fa_cpu_attention(&call.problem) != FA_OK) {
    stop_process(fa_cpu_last_error());
  }
  served_.fetch_add(1, std::memory_order_relaxed);
  nanoseconds_.fetch_add((Clock::now() - began).count(), std::memory_order_relaxed);
  kv_bytes_.fetch_add(kv_bytes(call.problem), std::memory_order_relaxed);
}

}  // namespace fastattention
