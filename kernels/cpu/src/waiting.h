// How threads wait for each other: they poll for a while, and then sleep in the kernel until they are woken.
#ifndef FASTATTENTION_WAITING_H
#define FASTATTENTION_WAITING_H

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fastattention {

using Clock = std::chrono::steady_clock;

void set_spin(int microseconds);  // how long waiting threads poll before they sleep
Clock::time_point end_of_spin(Clock::time_point now);

// A thread was stopped while it polled, for longer than interrupts take: something else needs its CPU. A polling thread
// would use up its share and then wait for the CPU when there is work, so for some seconds threads hardly poll.
void note_stop(Clock::time_point now);
bool was_stopped(Clock::duration gap);

// Sleeps while word is expected. It may return early.
void futex_wait(std::atomic<uint32_t>& word, uint32_t expected);
void futex_wait_for(std::atomic<uint32_t>& word, uint32_t expected, std::chrono::microseconds at_most);
void futex_wake(std::atomic<uint32_t>& word, int count);

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns true as soon as done() holds, and false if it does not hold by the end of the spin.
template <class Done>
bool spin_until(Done done) {
  for (int i = 0; i < 64; ++i) {
    if (done()) return true;
    relax();
  }
  auto now = Clock::now();
  const auto end = end_of_spin(now);
  do {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      relax();
    }
    const auto before = now;
    now = Clock::now();
    if (was_stopped(now - before)) {
      note_stop(now);
      break;
    }
  } while (now < end);
  return done();
}

}  // namespace fastattention

#endif
