#include "engine.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "isa.h"
#include "roof_choice.h"

namespace fastattention {
namespace {

// Fewer elements than this are copied before another thread has woken up.
constexpr int64_t kMinElementsPerWrite = 32 * 1024;

// A thread's turn at reading: so long that taking the next one costs nothing, so short that all end together.
constexpr int64_t kMinBytesPerRead = 64 * 1024;
constexpr int64_t kMaxBytesPerRead = 1024 * 1024;
constexpr int64_t kTurnsPerThread = 16;

}  // namespace

Engine& Engine::get() {
  // Never destroyed, so a daemon thread that calls during exit finds it; only its workers are joined.
  static Engine* engine = [] {
    static Engine* instance = new Engine;
    pthread_atfork([] { instance->before_fork(); }, [] { instance->after_fork_in_parent(); },
                   [] { instance->after_fork_in_child(); });
    static const struct Guard {
      ~Guard() { instance->shut_down(); }  // at exit and at dlclose
    } guard;
    return instance;
  }();
  return *engine;
}

void Engine::Buffer::reserve(size_t wanted) {
  if (wanted <= bytes) return;
  std::free(data);
  bytes = 0;
  data = std::aligned_alloc(64, (wanted + 63) / 64 * 64);
  if (data == nullptr) throw std::bad_alloc();
  bytes = wanted;
}

int Engine::num_threads() { return num_threads_.load(std::memory_order_relaxed); }

void Engine::set_num_threads(int num_threads, const std::vector<int>& cpus) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (num_threads == num_threads_ && cpus == cpus_) return;
  // Started here, so that a size or CPUs that cannot be had are refused and the pool stays as it was.
  auto pool = num_threads > 1 && !shut_down_ ? std::make_unique<ThreadPool>(num_threads, cpus) : nullptr;
  cpus_ = cpus;
  num_threads_ = num_threads;
  pool_ = std::move(pool);
}

void Engine::after_fork_in_child() {
  (void)pool_.release();  // its threads do not exist here, so it can be neither joined nor destroyed
  mutex_.unlock();
}

void Engine::shut_down() {
  const std::lock_guard<std::mutex> lock(mutex_);
  pool_.reset();
  shut_down_ = true;
}

ThreadPool* Engine::pool() {
  if (shut_down_ || num_threads_ == 1) return nullptr;
  if (pool_ == nullptr) pool_ = std::make_unique<ThreadPool>(num_threads_, cpus_);
  return pool_.get();
}

template <class F>
void Engine::for_each(int64_t count, const F& task) {
  struct Context {
    const F& task;
    int64_t count;
    alignas(64) std::atomic<int64_t> next;
  } context{task, count, {0}};
  const auto participate = [](void* opaque, int participant) {
    Context& shared = *static_cast<Context*>(opaque);
    for (int64_t i; (i = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.count;) {
      shared.task(i, participant);
    }
  };
  ThreadPool* threads = count > 1 ? pool() : nullptr;
  if (threads != nullptr) {
    threads->run(participate, &context);
  } else {
    participate(&context, 0);
  }
}

void Engine::attend(const fa_attention_problem& problem) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const KernelTable& kernel = active_kernel();
  make_plan(problem, plan_);
  if (plan_.num_items == 0) return;

  // All memory is taken here, so that nothing can fail inside the pool; each thread touches its own scratch first.
  const size_t scratch_bytes = kernel.scratch_bytes(plan_.max_rows, problem.head_size);
  if (scratch_.size() < static_cast<size_t>(num_threads_)) scratch_.resize(num_threads_);
  for (int i = 0; i < num_threads_; ++i) scratch_[i].reserve(scratch_bytes);
  partials_.reserve(plan_.partial_floats * sizeof(float));
  unmerged_.reserve(plan_.num_merges * sizeof(std::atomic<int32_t>));
  float* partials = static_cast<float*>(partials_.data);
  auto* unmerged = static_cast<std::atomic<int32_t>*>(unmerged_.data);
  for (const RowBlock& block : plan_.blocks) {
    if (block.num_splits == 1) continue;
    for (int head = 0; head < problem.num_kv_heads; ++head) {
      new (&unmerged[block.first_merge + head]) std::atomic<int32_t>(block.num_splits);
    }
  }

  for_each(plan_.num_items, [&](int64_t index, int participant) {
    const RowBlock& block = plan_.block_of(index);
    const int64_t within = index - block.first_item;
    const int64_t split = within / problem.num_kv_heads;  // heads inner: neighbours in memory run at the same time
    WorkItem item = block.item;
    item.kv_head = static_cast<int32_t>(within % problem.num_kv_heads);
    if (block.num_splits == 1) {
      kernel.attend(problem, item, scratch_[participant].data);
      return;
    }
    float* head_partials =
        partials + block.first_partial + block.partial_size * static_cast<size_t>(item.kv_head) * block.num_splits;
    item.kv_begin = block.item.kv_begin + split * block.split_len;
    item.kv_end = std::min(item.kv_begin + block.split_len, block.item.kv_end);
    item.partial = head_partials + block.partial_size * split;
    kernel.attend(problem, item, scratch_[participant].data);
    // Whoever finishes last merges; release and acquire make the others' partials visible to it.
    if (unmerged[block.first_merge + item.kv_head].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      item.partial = head_partials;
      kernel.merge(problem, item, block.num_splits);
    }
  });
}

void Engine::write_kv(const fa_kv_write& write) {
  const KernelTable& kernel = active_kernel();
  const int64_t per_token = static_cast<int64_t>(write.num_kv_heads) * write.head_size * 2;
  const int64_t tokens_per_item = std::max<int64_t>(1, kMinElementsPerWrite / per_token);
  if (write.num_tokens <= tokens_per_item) {
    kernel.write_kv(write, 0, write.num_tokens);
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  for_each((write.num_tokens + tokens_per_item - 1) / tokens_per_item, [&](int64_t index, int) {
    kernel.write_kv(write, index * tokens_per_item, std::min(write.num_tokens, (index + 1) * tokens_per_item));
  });
}

uint64_t Engine::read_pages(const void* const* pages, const int64_t* bytes, int64_t num_pages, ReadMethod method) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const ReadLoop read = best_read_loop();
  int64_t total = 0;
  for (int64_t page = 0; page < num_pages; ++page) total += bytes[page];
  const int64_t wanted =
      std::clamp(total / (num_threads_ * kTurnsPerThread), kMinBytesPerRead, kMaxBytesPerRead) / 64 * 64;

  struct Turn {
    int64_t page, offset;
  };
  std::vector<Turn> turns;
  for (int64_t page = 0, filled = wanted; page < num_pages; ++page) {
    for (int64_t offset = 0; offset < bytes[page];) {
      if (filled == wanted) {
        turns.push_back({page, offset});
        filled = 0;
      }
      const int64_t taken = std::min(wanted - filled, bytes[page] - offset);
      filled += taken;
      offset += taken;
    }
  }
  const int64_t num_turns = static_cast<int64_t>(turns.size());
  turns.push_back({num_pages, 0});

  std::atomic<uint64_t> checksum{0};
  for_each(num_turns, [&](int64_t index, int) {
    const Turn end = turns[index + 1];
    uint64_t sum = 0;
    int64_t offset = turns[index].offset;
    for (int64_t page = turns[index].page; page < end.page; ++page, offset = 0) {
      sum ^= read(static_cast<const char*>(pages[page]) + offset, bytes[page] - offset, method);
    }
    if (end.offset > offset)
      sum ^= read(static_cast<const char*>(pages[end.page]) + offset, end.offset - offset, method);
    checksum.fetch_xor(sum, std::memory_order_relaxed);
  });
  return checksum;
}

void Engine::spin(const PeakLoop& loop, int64_t iterations) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t turns = std::min<int64_t>(iterations, num_threads_ * kTurnsPerThread);
  for_each(turns, [&](int64_t index, int) {
    volatile float result = loop.run(iterations * (index + 1) / turns - iterations * index / turns);
    (void)result;
  });
}

}  // namespace fastattention
