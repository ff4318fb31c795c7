// Compiles one kernel source as ordinary C++. KERNEL_SOURCE: its name in quotes. KERNELS: EMULATED(name) for each
// kernel.
#include "cuda.h"
#include KERNEL_SOURCE

namespace {

template <class Parameters>
void call(void (*kernel)(Parameters), const void* parameters) {
  kernel(*static_cast<const Parameters*>(parameters));
}

}  // namespace

#define EMULATED(name)                                                                            \
  extern "C" __attribute__((visibility("default"))) void emulate_##name(const void* parameters) { \
    call(fastattention::name, parameters);                                                        \
  }
KERNELS
