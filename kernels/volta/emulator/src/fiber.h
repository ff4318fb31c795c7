// One thread of a kernel: code with a stack of its own that stops where it says so and goes on there later.
#ifndef VOLTA_EMULATOR_FIBER_H
#define VOLTA_EMULATOR_FIBER_H

#include <cstddef>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace volta_emulator {

class Fiber {
 public:
  // `body` must not return; it ends by stopping and never being resumed.
  void start(void* stack, size_t bytes, void (*body)());
  void resume();  // called from outside of all fibers; returns when this one stops
  void stop();    // called from this fiber

 private:
#ifdef __x86_64__  // swapcontext would ask the system for the signal mask, for each of millions of switches
  void *own_ = nullptr, *outside_ = nullptr;  // stack pointers of whoever does not run
#else
  ucontext_t own_, outside_;
#endif
};

}  // namespace volta_emulator

#endif
