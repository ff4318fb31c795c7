// How threads wait for each other: they poll for a while, and then sleep in the kernel until they are woken.
#ifndef FASTATTENTION_WAITING_H
#define FASTATTENTION_WAITING_H

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fastattention {

void set_spin(int microseconds);  // how long waiting threads poll before they sleep
int spin_microseconds();

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

// Returns true as soon as done() holds, and false if it does not hold within spin_microseconds().
template <class Done>
bool spin_until(Done done) {
  for (int i = 0; i < 64; ++i) {
    if (done()) return true;
    relax();
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_microseconds());
  do {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return done();
}

}  // namespace fastattention

#endif
