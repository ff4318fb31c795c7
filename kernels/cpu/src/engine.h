// Runs planned work on the thread pool. One per process; callers from several threads take turns.
#ifndef FASTATTENTION_ENGINE_H
#define FASTATTENTION_ENGINE_H

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernel.h"
#include "plan.h"
#include "roofline.h"
#include "thread_pool.h"

namespace fastattention {

class Engine {
 public:
  static Engine& get();

  int num_threads();
  void set_num_threads(int num_threads, const std::vector<int>& cpus);
  // The workers compute between these two; then the calling thread, which must be the same, joins them. Whatever
  // problem points to must live that long. Nothing else can be computed meanwhile: other threads wait, this one gets an
  // error.
  void start_attention(const fa_attention_problem& problem);
  void finish_attention();
  void write_kv(const fa_kv_write& write);
  // By all threads, so that pages not yet touched come fast and from where the readers are.
  void zero(void* address, int64_t bytes);

  int64_t measure_wake();  // nanoseconds until every participant of a job runs; -1: not within a second
  uint64_t read_pages(const void* const* pages, const int64_t* bytes, int64_t num_pages, ReadMethod method);
  void spin(const PeakLoop& loop, int64_t iterations);

  // Around fork(): a child has none of its parent's threads, so it starts with a pool of its own.
  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

  void shut_down();  // joins the workers; later calls run on the calling thread alone

 private:
  struct Buffer {
    void* data = nullptr;
    size_t bytes = 0;
    void reserve(size_t wanted);  // throws std::bad_alloc; contents are lost
  };

  // Calls task(object, i, the i that the same thread will do next or -1, participant) for every i in [0, count), each
  // once, in any order on any thread.
  struct Work {
    void (*task)(void* object, int64_t index, int64_t next, int participant);
    void* object;
    int64_t count;
    int64_t last_reserved;
    ThreadPool* threads;  // null: the caller alone
    alignas(64) std::atomic<int64_t> next;
  };
  static void participate(void* work, int participant);
  void start(Work& work, bool alone);
  void finish(Work& work);
  template <class F>
  void for_each(int64_t count, const F& task);

  std::unique_lock<std::mutex> turn();  // throws std::logic_error between this thread's start and its finish
  bool has_started() const { return starter_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }
  float* partial_of(const RowBlock& block, int64_t head, int64_t split) const;
  WorkItem item_at(int64_t index, const RowBlock*& block) const;
  void attend_item(int64_t index, int64_t next, int participant);
  ThreadPool* pool();

  std::mutex mutex_;
  std::atomic<std::thread::id> starter_{};  // who holds the mutex from start_attention() to finish_attention()
  fa_attention_problem problem_;
  const KernelTable* kernel_;
  Work attention_;
  std::atomic<int> num_threads_{affinity_cpus()};
  std::vector<int> cpus_;  // worker i is pinned to cpus_[i % size]; empty: it may run where its creator may
  bool shut_down_ = false;
  std::unique_ptr<ThreadPool> pool_;
  // Kept between calls: a decode step calls once per layer with the same sizes.
  Plan plan_;
  std::vector<Buffer> scratch_;  // one per participant
  Buffer partials_;
  Buffer unmerged_;  // per merge: items still running
};

}  // namespace fastattention

#endif
