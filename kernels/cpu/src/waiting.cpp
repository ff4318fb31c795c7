#include "waiting.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "schedule_tuning.h"

namespace fastattention {
namespace {

std::atomic<int> spin{kPool.spin_microseconds};
std::atomic<Clock::rep> shared_until{Clock::time_point::min().time_since_epoch().count()};

}  // namespace

void set_spin(int microseconds) { spin.store(microseconds, std::memory_order_relaxed); }

Clock::time_point end_of_spin(Clock::time_point now) {
  const bool shared = now.time_since_epoch().count() < shared_until.load(std::memory_order_relaxed);
  const int wanted = spin.load(std::memory_order_relaxed);
  return now + std::chrono::microseconds(shared ? std::min(wanted, kPool.spin_microseconds) : wanted);
}

void note_stop(Clock::time_point now) {
  shared_until.store((now + std::chrono::milliseconds(kPool.shared_milliseconds)).time_since_epoch().count(),
                     std::memory_order_relaxed);
}

bool was_stopped(Clock::duration gap) { return gap > std::chrono::microseconds(kPool.stop_microseconds); }

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
