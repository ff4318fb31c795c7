#include "engine.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>

#include "isa.h"
#include "roofline_choice.h"
#include "schedule_tuning.h"

namespace fastattention {
namespace {

// Bytes that a thread reads before it takes the next piece: enough to make taking a piece cheap, few enough that all
// threads end at about the same time.
constexpr int64_t kMinBytesPerRead = 64 * 1024;
constexpr int64_t kMaxBytesPerRead = 1024 * 1024;
constexpr int64_t kTurnsPerThread = 16;

}  // namespace

Engine& Engine::get() {
  // Never destroyed, because a daemon thread may call during exit. Only its workers are joined.
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
  const std::unique_lock<std::mutex> lock = turn();
  if (num_threads == num_threads_ && cpus == cpus_) return;
  // Started before anything is changed: if the size or the CPUs are refused, the pool stays as it was.
  auto pool = num_threads > 1 && !shut_down_ ? std::make_unique<ThreadPool>(num_threads, cpus) : nullptr;
  cpus_ = cpus;
  num_threads_ = num_threads;
  pool_ = std::move(pool);
}

void Engine::before_fork() {
  if (!has_started()) mutex_.lock();
}

void Engine::after_fork_in_parent() {
  if (!has_started()) mutex_.unlock();
}

void Engine::after_fork_in_child() {
  (void)pool_.release();  // the child has none of its threads, so it can be neither joined nor destroyed
  starter_.store({}, std::memory_order_relaxed);  // the parent finishes what was started
  mutex_.unlock();
}

void Engine::shut_down() {
  if (has_started()) return;  // the process ends between start and finish
  const std::unique_lock<std::mutex> lock = turn();
  pool_.reset();
  shut_down_ = true;
}

ThreadPool* Engine::pool() {
  if (shut_down_ || num_threads_ == 1) return nullptr;
  if (pool_ == nullptr) pool_ = std::make_unique<ThreadPool>(num_threads_, cpus_);
  return pool_.get();
}

std::unique_lock<std::mutex> Engine::turn() {
  if (has_started()) throw std::logic_error("this thread has started attention and must finish it first");
  return std::unique_lock<std::mutex>(mutex_);
}

void Engine::participate(void* work, int participant) {
  Work& shared = *static_cast<Work*>(work);
  const auto take = [&] { return shared.next.fetch_add(1, std::memory_order_relaxed); };
  for (int64_t i = take(); i < shared.count;) {
    // A task that knows its successor can prefetch for it. Near the end nothing is reserved, so that whichever thread
    // is free takes the next item.
    const int64_t reserved = i < shared.last_reserved ? take() : -1;
    shared.task(shared.object, i, reserved < shared.count ? reserved : -1, participant);
    i = reserved >= 0 ? reserved : take();
  }
}

void Engine::start(Work& work, bool alone) {
  work.next.store(0, std::memory_order_relaxed);
  work.threads = work.count > 1 && !alone ? pool() : nullptr;
  if (work.threads == nullptr) {
    work.last_reserved = work.count;
    return;
  }
  work.last_reserved = work.count - kPool.unreserved_items_per_thread * num_threads_;
  work.threads->start(participate, &work, static_cast<int>(std::min<int64_t>(work.count, num_threads_) - 1));
}

void Engine::finish(Work& work) {
  if (work.threads != nullptr) {
    work.threads->join();
  } else {
    participate(&work, 0);
  }
}

float* Engine::partial_of(const RowBlock& block, int64_t head, int64_t split) const {
  return static_cast<float*>(partials_.data) + block.first_partial +
         block.partial_size * static_cast<size_t>(head * block.num_splits + split);
}

WorkItem Engine::item_at(int64_t index, const RowBlock*& block) const {
  // Heads are the inner index, so that neighbours in memory are computed at the same time.
  const Piece& piece = plan_.pieces[static_cast<size_t>(index / problem_.num_kv_heads)];
  block = &plan_.blocks[static_cast<size_t>(piece.block)];
  WorkItem item = block->item;
  item.kv_head = static_cast<int32_t>(index % problem_.num_kv_heads);
  if (block->num_splits > 1) {
    item.kv_begin = split_begin(*block, piece.split);
    item.kv_end = split_begin(*block, piece.split + 1);
    item.partial = partial_of(*block, item.kv_head, piece.split);
  }
  return item;
}

void Engine::attend_item(int64_t index, int64_t next, int participant) {
  const RowBlock* block = nullptr;
  const RowBlock* next_block = nullptr;
  WorkItem item = item_at(index, block);
  const WorkItem following = next >= 0 ? item_at(next, next_block) : WorkItem{};
  kernel_->attend(problem_, item, next >= 0 ? &following : nullptr, scratch_[participant].data);
  if (block->num_splits == 1) return;
  // The thread that finishes last merges. Release and acquire make the other threads' partial results visible to it.
  auto* unmerged = static_cast<std::atomic<int32_t>*>(unmerged_.data);
  if (unmerged[block->first_merge + item.kv_head].fetch_sub(1, std::memory_order_acq_rel) == 1) {
    item.partial = partial_of(*block, item.kv_head, 0);
    kernel_->merge(problem_, item, block->num_splits);
  }
}

void Engine::start_attention(const fa_attention_problem& problem) {
  std::unique_lock<std::mutex> lock = turn();
  problem_ = problem;
  kernel_ = &active_kernel();
  make_plan(problem, *kernel_, plan_);

  // All memory is allocated here, so that nothing can fail inside the pool. Each thread is the first to touch its own
  // scratch memory.
  const size_t scratch_bytes = plan_.num_items > 0 ? kernel_->scratch_bytes(plan_.max_rows, problem.head_size) : 0;
  if (scratch_.size() < static_cast<size_t>(num_threads_)) scratch_.resize(num_threads_);
  for (int i = 0; i < num_threads_; ++i) scratch_[i].reserve(scratch_bytes);
  partials_.reserve(plan_.partial_floats * sizeof(float));
  unmerged_.reserve(plan_.num_merges * sizeof(std::atomic<int32_t>));
  auto* unmerged = static_cast<std::atomic<int32_t>*>(unmerged_.data);
  for (const RowBlock& block : plan_.blocks) {
    if (block.num_splits == 1) continue;
    for (int head = 0; head < problem.num_kv_heads; ++head) {
      new (&unmerged[block.first_merge + head]) std::atomic<int32_t>(block.num_splits);
    }
  }
  attention_.task = [](void* engine, int64_t index, int64_t next, int participant) {
    static_cast<Engine*>(engine)->attend_item(index, next, participant);
  };
  attention_.object = this;
  attention_.count = plan_.num_items;
  start(attention_, plan_.multiply_adds < kPool.solo_multiply_adds);
  starter_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  lock.release();  // finish_attention() unlocks the mutex
}

void Engine::finish_attention() {
  if (!has_started()) throw std::logic_error("this thread has not started attention, so it cannot finish it");
  finish(attention_);
  starter_.store({}, std::memory_order_relaxed);
  mutex_.unlock();
}

void Engine::write_kv(const fa_kv_write& write) {
  const KernelTable& kernel = active_kernel();
  const int64_t per_token = static_cast<int64_t>(write.num_kv_heads) * write.head_size * 2;
  const int64_t tokens_per_item = std::max<int64_t>(1, kMinElementsPerWrite / per_token);
  if (write.num_tokens <= tokens_per_item) {
    kernel.write_kv(write, 0, write.num_tokens);
    return;
  }
  const std::unique_lock<std::mutex> lock = turn();
  run((write.num_tokens + tokens_per_item - 1) / tokens_per_item, false, [&](int64_t index, int) {
    kernel.write_kv(write, index * tokens_per_item, std::min(write.num_tokens, (index + 1) * tokens_per_item));
  });
}

void Engine::zero(void* address, int64_t bytes) {
  const std::unique_lock<std::mutex> lock = turn();
  run((bytes + kTouchBytes - 1) / kTouchBytes, false, [&](int64_t index, int) {
    char* const begin = static_cast<char*>(address) + index * kTouchBytes;
    const int64_t length = std::min(kTouchBytes, bytes - index * kTouchBytes);
    std::memset(begin, 0, static_cast<size_t>(length));
  });
}

int64_t Engine::measure_wake() {
  using Clock = std::chrono::steady_clock;
  const std::unique_lock<std::mutex> lock = turn();
  ThreadPool* threads = pool();
  if (threads == nullptr) return 0;
  struct Context {
    int awaited;
    Clock::time_point start;
    std::atomic<int> arrived;
    std::atomic<int64_t> last;
  } context{threads->num_threads(), Clock::now(), {0}, {-1}};
  threads->run(
      [](void* opaque, int) {
        Context& shared = *static_cast<Context*>(opaque);
        const auto now = Clock::now();
        if (shared.arrived.fetch_add(1) + 1 == shared.awaited) {
          shared.last = std::chrono::duration_cast<std::chrono::nanoseconds>(now - shared.start).count();
        }
        // The caller stays until all have arrived, because workers that arrive after it has left are turned away.
        while (shared.arrived.load() < shared.awaited && Clock::now() - shared.start < std::chrono::seconds(1)) {
          std::this_thread::yield();
        }
      },
      &context, context.awaited - 1);
  return context.last;
}

uint64_t Engine::read_pages(const void* const* pages, const int64_t* bytes, int64_t num_pages, ReadMethod method) {
  const std::unique_lock<std::mutex> lock = turn();
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
  run(num_turns, false, [&](int64_t index, int) {
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
  const std::unique_lock<std::mutex> lock = turn();
  const int64_t turns = std::min<int64_t>(iterations, num_threads_ * kTurnsPerThread);
  run(turns, false, [&](int64_t index, int) {
    volatile float result = loop.run(iterations * (index + 1) / turns - iterations * index / turns);
    (void)result;
  });
}

}  // namespace fastattention
