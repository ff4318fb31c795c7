// The attention calls of a device's CUDA graphs. A graph cannot call the host, so it rings: it writes a call's number
// to pinned memory and waits there for the answer. A thread of this process polls the number, stores the call's new
// keys and values, attends, and answers. Everything about a call but the contents of its tensors is known beforehand.
#ifndef FASTATTENTION_GRAPH_CALLS_H
#define FASTATTENTION_GRAPH_CALLS_H

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "fastattention_cpu.h"

namespace fastattention {

class GraphCalls {
 public:
  explicit GraphCalls(int cpu);  // throws std::system_error if the thread cannot be started, or pinned to cpu
  ~GraphCalls();                 // does not wait for calls that have not been rung
  GraphCalls(const GraphCalls&) = delete;
  GraphCalls& operator=(const GraphCalls&) = delete;

  uint32_t* doorbell() const { return rung_; }
  uint32_t add(const fa_kv_write& write, const fa_attention_problem& problem);  // the call's number, from 1 on
  void wake();
  fa_cpu_graph_counters counters() const;

 private:
  struct Call {
    fa_kv_write write;
    fa_attention_problem problem;
  };

  void serve();
  uint32_t next_call();  // 0: the thread is to end
  void run(uint32_t number);

  uint32_t* const rung_;
  uint32_t* const answered_;
  mutable std::mutex mutex_;
  std::vector<Call> calls_;
  std::atomic<uint32_t> wakes_{0};
  std::atomic<bool> closing_{false};
  std::atomic<int64_t> served_{0}, nanoseconds_{0}, kv_bytes_{0};
  std::thread thread_;
};

}  // namespace fastattention

#endif
