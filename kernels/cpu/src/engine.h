// Runs planned work on the thread pool. There is one engine per process; calls from several threads take turns.
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
  // Between these two calls the workers compute. Then the calling thread, which must be the same, joins them.
  // Everything that the problem points to must stay valid until then. Meanwhile other threads' calls wait, and this
  // thread's calls throw.
  void start_attention(const fa_attention_problem& problem);
  void finish_attention();
  void write_kv(const fa_kv_write& write);
  void gated_delta(const fa_gated_delta& problem);
  void gated_norm(const fa_gated_norm& problem);
  void sample(const fa_sampling& problem);
  void linear(const fa_linear& problem);
  void rotate(const fa_rotary& problem);
  // Zeroes the range on all threads, so that new pages are touched quickly and by the threads that will read them.
  void zero(void* address, int64_t bytes);

  int64_t measure_wake();  // nanoseconds until every participant of a job runs; -1: not within a second
  uint64_t read_pages(const void* const* pages, const int64_t* bytes, int64_t num_pages, ReadMethod method);
  void spin(const PeakLoop& loop, int64_t iterations);

  // fork() handlers. A child process has none of its parent's threads, so it starts a new pool.
  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

  void shut_down();  // joins the workers; later calls run on the calling thread only

 private:
  struct Buffer {
    void* data = nullptr;
    size_t bytes = 0;
    void reserve(size_t wanted);  // throws std::bad_alloc; contents are lost
  };

  // Calls task(object, i, next, participant) once for every i in [0, count), in any order and on any thread. next is
  // the index that the same thread will take next, or -1 if it is not known.
  struct Work {
    void (*task)(void* object, int64_t index, int64_t next, int participant);
    void* object;
    int64_t count;
    int64_t last_reserved;
    ThreadPool* threads;  // null: only the calling thread
    alignas(64) std::atomic<int64_t> next;
  };
  static void participate(void* work, int participant);
  void start(Work& work, bool alone);
  void finish(Work& work);
  // Calls task(i, participant) once for every i in [0, count), on the calling thread only if alone.
  template <class F>
  void run(int64_t count, bool alone, const F& task) {
    Work work{};
    work.task = [](void* object, int64_t index, int64_t, int participant) {
      (*static_cast<const F*>(object))(index, participant);
    };
    work.object = const_cast<F*>(&task);
    work.count = count;
    start(work, alone);
    finish(work);
  }

  std::unique_lock<std::mutex> turn();  // throws std::logic_error between this thread's start and its finish
  bool has_started() const { return starter_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }
  float* partial_of(const RowBlock& block, int64_t head, int64_t split) const;
  WorkItem item_at(int64_t index, const RowBlock*& block) const;
  void attend_item(int64_t index, int64_t next, int participant);
  ThreadPool* pool();

  std::mutex mutex_;
  // The thread that holds the mutex from start_attention() to finish_attention().
  std::atomic<std::thread::id> starter_{};
  fa_attention_problem problem_;
  const KernelTable* kernel_;
  Work attention_;
  std::atomic<int> num_threads_{affinity_cpus()};
  std::vector<int> cpus_;  // empty: workers inherit their creator's affinity
  bool shut_down_ = false;
  std::unique_ptr<ThreadPool> pool_;
  // Kept between calls, because a decode step calls once per layer with the same sizes.
  Plan plan_;
  std::vector<Buffer> scratch_;  // one per participant
  Buffer partials_;
  Buffer arranged_;  // inputs of a linear layer
  Buffer unmerged_;  // for each merge, the number of items that still run
};

}  // namespace fastattention

#endif
