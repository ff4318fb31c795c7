#include "fiber.h"

#include <cstdint>

namespace volta_emulator {

#ifdef __x86_64__

// Saves the registers that a function must preserve (System V ABI) and the stack pointer in *from, then continues where
// `to` was saved.
extern "C" void fa_emulator_switch(void** from, void* to);
asm(R"(
.text
.local fa_emulator_switch
.type fa_emulator_switch, @function
fa_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fa_emulator_switch, . - fa_emulator_switch
)");

void Fiber::start(void* stack, size_t bytes, void (*body)()) {
  auto* top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15});
  // The place of a return address: at a function's start the stack pointer is 8 bytes off a multiple of 16.
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(body);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  own_ = top;
}

void Fiber::resume() { fa_emulator_switch(&outside_, own_); }

void Fiber::stop() { fa_emulator_switch(&own_, outside_); }

#else

void Fiber::start(void* stack, size_t bytes, void (*body)()) {
  getcontext(&own_);
  own_.uc_stack.ss_sp = stack;
  own_.uc_stack.ss_size = bytes;
  own_.uc_link = nullptr;
  makecontext(&own_, body, 0);
}

void Fiber::resume() { swapcontext(&outside_, &own_); }

void Fiber::stop() { swapcontext(&own_, &outside_); }

#endif

}  // namespace volta_emulator
