// A persistent thread pool that the calling thread takes part in. Between jobs workers first poll, because the next
// layer's call usually follows within microseconds, and then sleep, because the model's other operators need the cores.
#ifndef FASTATTENTION_THREAD_POOL_H
#define FASTATTENTION_THREAD_POOL_H

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace fastattention {

class ThreadPool {
 public:
  using Task = void (*)(void* context, int participant);  // participant in [0, num_threads); must not throw

  // num_threads includes the caller of join(), which is participant 0 and keeps its affinity. Worker i is pinned to
  // cpus[i % size], which leaves cpus[0] to the caller. If cpus is empty, workers inherit their creator's affinity.
  // Throws std::system_error if a worker cannot be started or any CPU in the list cannot be used, even one that no
  // worker would be pinned to.
  ThreadPool(int num_threads, const std::vector<int>& cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs task on the thread that calls join() and on all workers that wake up before it is done. The participants share
  // the work among themselves; helpers is the number of workers worth waking. There is one job at a time. context must
  // live until join() returns, after all participants are done.
  void start(Task task, void* context, int helpers);
  void join();
  void run(Task task, void* context, int helpers) {
    start(task, context, helpers);
    join();
  }

 private:
  void work(int participant);
  void wake_sleepers();
  void stop();

  std::vector<std::thread> workers_;
  Task task_ = nullptr;
  void* context_ = nullptr;
  // In separate cache lines: workers poll epoch_ while the gate changes hands.
  alignas(64) std::atomic<uint32_t> epoch_{0};  // counts jobs
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<int> to_wake_{0};  // sleepers that are still to be woken for this job
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> gate_{0};  // kOpen | number of workers inside the job
};

// Throws std::system_error for a CPU that cannot be used. If it goes offline later, the kernel moves the thread.
void pin(std::thread& thread, int cpu);
int affinity_cpus();  // number of CPUs that this process may run on

}  // namespace fastattention

#endif
