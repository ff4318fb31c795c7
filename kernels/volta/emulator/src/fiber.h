// One thread of a kernel: code with its own stack, which stops itself and is resumed later from where it stopped.
#ifndef VOLTA_EMULATOR_FIBER_H
#define VOLTA_EMULATOR_FIBER_H

#include <cstddef>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace volta_emulator {

class Fiber {
 public:
  // `body` must not return. It ends by stopping for good.
  void start(void* stack, size_t bytes, void (*body)());
  void resume();  // call from outside of all fibers; returns when this one stops
  void stop();    // call from this fiber

 private:
#ifdef __x86_64__  // swapcontext would make a system call for the signal mask, in each of millions of switches
  // Stack pointers of the fiber and of its caller, each saved while the other runs.
  void *own_ = nullptr, *outside_ = nullptr;
#else
  ucontext_t own_, outside_;
#endif
};

}  // namespace volta_emulator

#endif
