#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <climits>
#include <string>
#include <system_error>

#include "schedule_tuning.h"
#include "waiting.h"

namespace fastattention {
namespace {

constexpr uint32_t kOpen = 1u << 31;
}  // namespace

void pin(std::thread& thread, int cpu) {
  const size_t bytes = CPU_ALLOC_SIZE(cpu + 1);
  std::vector<cpu_set_t> set(bytes / sizeof(cpu_set_t) + 1);
  CPU_ZERO_S(bytes, set.data());
  CPU_SET_S(cpu, bytes, set.data());
  const int error = pthread_setaffinity_np(thread.native_handle(), bytes, set.data());
  if (error != 0) {
    throw std::system_error(error, std::generic_category(),
                            "CPU " + std::to_string(cpu) + " is offline or outside this process's cpuset");
  }
}

ThreadPool::ThreadPool(int num_threads, const std::vector<int>& cpus) {
  // Workers block all signals: Python's handlers expect signals on its main thread.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    workers_.reserve(num_threads - 1);
    for (int i = 1; i < num_threads; ++i) {
      workers_.emplace_back(&ThreadPool::work, this, i);
      if (i == 1) {  // every CPU is tried, so that the number of threads does not decide whether a list is refused
        for (const int cpu : cpus) pin(workers_.back(), cpu);
      }
      if (!cpus.empty()) pin(workers_.back(), cpus[static_cast<size_t>(i) % cpus.size()]);
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

// Wakes up to wake_fan_out of the sleepers that the job still needs. Workers that poll arrive by themselves and may
// make some of the woken ones superfluous; those find no work and sleep again.
void ThreadPool::wake_sleepers() {
  if (sleepers_.load() == 0) return;
  int wanted = to_wake_.load(std::memory_order_relaxed);
  int taken = 0;
  do {
    taken = std::min(wanted, kPool.wake_fan_out);
    if (taken <= 0) return;
  } while (!to_wake_.compare_exchange_weak(wanted, wanted - taken, std::memory_order_relaxed));
  futex_wake(epoch_, taken);
}

void ThreadPool::start(Task task, void* context, int helpers) {
  task_ = task;
  context_ = context;
  to_wake_.store(std::min(helpers, static_cast<int>(workers_.size())), std::memory_order_relaxed);
  gate_.store(kOpen, std::memory_order_release);
  epoch_.fetch_add(1);
  // Either this thread sees a worker that has announced its sleep, or that worker's futex call sees the new epoch: both
  // sides write first and read second, sequentially consistent. Woken threads wake others, so that no thread has to
  // wake 100.
  wake_sleepers();
}

void ThreadPool::join() {
  task_(context_, 0);

  // Workers that have not arrived by now are not needed. Wait for those inside.
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
    // Enter only while the job is open, because its context is gone when the caller returns.
    uint32_t gate = gate_.load(std::memory_order_relaxed);
    if (slept && (gate & kOpen) != 0) wake_sleepers();
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
  // Linux requires room for every possible CPU: double the capacity until it is enough.
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
