#include "thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <system_error>

namespace fastattention {
namespace {

constexpr uint32_t kOpen = 1u << 31;
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kWakeFanOut = 2;

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}
void futex_wake(std::atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// True once done() holds; false when it did not within kSpin.
template <class Done>
bool spin_until(Done done) {
  for (int i = 0; i < 64; ++i) {
    if (done()) return true;
    relax();
  }
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return done();
}

void bind(std::thread& thread, const std::vector<int>& cpus) {
  const int highest = *std::max_element(cpus.begin(), cpus.end());
  const size_t bytes = CPU_ALLOC_SIZE(highest + 1);
  std::vector<cpu_set_t> set(bytes / sizeof(cpu_set_t) + 1);
  CPU_ZERO_S(bytes, set.data());
  for (const int cpu : cpus) CPU_SET_S(cpu, bytes, set.data());
  const int error = pthread_setaffinity_np(thread.native_handle(), bytes, set.data());
  if (error != 0) throw std::system_error(error, std::generic_category(), "none of the CPUs named may be used");
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, const std::vector<int>& cpus) {
  // Signals are the application's business: Python's handlers expect them on its main thread.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    workers_.reserve(num_threads - 1);
    for (int i = 1; i < num_threads; ++i) {
      workers_.emplace_back(&ThreadPool::work, this, i);
      if (!cpus.empty()) bind(workers_.back(), cpus);
    }
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    stop();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  stopping_.store(true);
  epoch_.fetch_add(1);
  futex_wake(epoch_, INT_MAX);
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

void ThreadPool::run(Task task, void* context) {
  task_ = task;
  context_ = context;
  gate_.store(kOpen, std::memory_order_release);
  epoch_.fetch_add(1);
  // Either this sees a worker that announced its sleep, or that worker's futex call sees the new epoch: both sides
  // write first and read second, sequentially consistent. Whoever wakes wakes others, so that no one wakes 100.
  if (sleepers_.load() > 0) futex_wake(epoch_, kWakeFanOut);

  task(context, 0);

  // Workers that have not come by now are not needed any more; wait for those inside.
  gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
  if (spin_until([this] { return gate_.load(std::memory_order_acquire) == 0; })) return;
  for (uint32_t inside; (inside = gate_.load(std::memory_order_acquire)) != 0;) futex_wait(gate_, inside);
}

void ThreadPool::work(int participant) {
  pthread_setname_np(pthread_self(), "fastattention");
  uint32_t seen = 0;
  for (;;) {
    const auto news = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
    bool slept = false;
    if (!spin_until(news)) {
      slept = true;
      sleepers_.fetch_add(1);
      while (epoch_.load() == seen) futex_wait(epoch_, seen);
      sleepers_.fetch_sub(1);
    }
    if (stopping_.load()) return;
    seen = epoch_.load(std::memory_order_acquire);
    if (slept && sleepers_.load() > 0) futex_wake(epoch_, kWakeFanOut);

    // Enter only while the job is open: its context dies with the caller's return.
    uint32_t gate = gate_.load(std::memory_order_relaxed);
    bool entered = false;
    while ((gate & kOpen) != 0 && !entered) {
      entered = gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel, std::memory_order_relaxed);
    }
    if (!entered) continue;
    task_(context_, participant);
    if (gate_.fetch_sub(1, std::memory_order_acq_rel) == 1) futex_wake(gate_, 1);
  }
}

int affinity_cpus() {
  // The kernel wants room for every possible CPU; grow until it is content.
  for (int capacity = 1024; capacity <= 1 << 18; capacity *= 2) {
    cpu_set_t* set = CPU_ALLOC(capacity);
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(capacity);
    const bool read = sched_getaffinity(0, bytes, set) == 0;
    const int count = read ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
  }
  const unsigned hardware = std::thread::hardware_concurrency();
  return hardware > 0 ? static_cast<int>(hardware) : 1;
}

}  // namespace fastattention
