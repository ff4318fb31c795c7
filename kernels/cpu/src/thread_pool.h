// A persistent pool. The calling thread takes part; workers spin briefly between jobs, because the next layer's call
// is usually microseconds away, and then sleep, because the threads of the model's other operators need the cores.
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

  // num_threads includes the caller of join(), which is participant 0 and stays where its owner put it. Worker i is
  // pinned to cpus[i % size], which leaves cpus[0] to the caller; with no cpus, workers may run where their creator
  // may. Throws std::system_error, also for a CPU in the list that no worker would be pinned to.
  ThreadPool(int num_threads, const std::vector<int>& cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs task on the workers that wake up before join() and on the thread that calls join(), which is participant 0.
  // Participants share the work among themselves; helpers says how many workers it is enough to wake. One job at a
  // time; context must live until join() returns, which it does when all participants are done.
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
  // Apart, for the cache: workers poll epoch_ while the gate changes hands.
  alignas(64) std::atomic<uint32_t> epoch_{0};  // counts jobs
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<int> to_wake_{0};  // sleepers that this job still wants
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> gate_{0};  // kOpen | number of workers inside the job
};

void set_spin(int microseconds);  // how long idle workers, of any pool, poll before they sleep
int affinity_cpus();              // CPUs this process may run on

}  // namespace fastattention

#endif
