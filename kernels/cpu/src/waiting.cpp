#include "waiting.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "schedule_tuning.h"

namespace fastattention {
namespace {

std::atomic<int> spin{kPool.spin_microseconds};

}  // namespace

void set_spin(int microseconds) { spin.store(microseconds, std::memory_order_relaxed); }

int spin_microseconds() { return spin.load(std::memory_order_relaxed); }

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wait_for(std::atomic<uint32_t>& word, uint32_t expected, std::chrono::microseconds at_most) {
  const timespec time{static_cast<time_t>(at_most.count() / 1000000),
                      static_cast<long>(at_most.count() % 1000000 * 1000)};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, &time, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

}  // namespace fastattention
