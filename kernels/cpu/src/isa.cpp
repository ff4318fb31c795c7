#include "isa.h"

#include <atomic>

namespace fastattention {

extern const KernelTable kScalar;
#if defined(__x86_64__)
extern const KernelTable kAvx512;
extern const KernelTable kAvx2;
#elif defined(__aarch64__)
extern const KernelTable kNeon;
#endif

namespace {

std::vector<const KernelTable*> detect() {
  std::vector<const KernelTable*> kernels;
#if defined(__x86_64__)
  __builtin_cpu_init();  // these builtins also ask the operating system whether it saves the wide registers
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    kernels.push_back(&kAvx512);
  }
  if (avx2) kernels.push_back(&kAvx2);
#elif defined(__aarch64__)
  kernels.push_back(&kNeon);
#endif
  kernels.push_back(&kScalar);
  return kernels;
}

std::atomic<const KernelTable*>& active() {
  static std::atomic<const KernelTable*> kernel{usable_kernels().front()};
  return kernel;
}

}  // namespace

// These two are never destroyed: a daemon thread may call for the first time while the process ends.
const std::vector<const KernelTable*>& usable_kernels() {
  static const auto* kernels = new std::vector<const KernelTable*>(detect());
  return *kernels;
}

const char* usable_isas() {
  static const std::string* names = [] {
    auto* joined = new std::string;
    for (const KernelTable* kernel : usable_kernels())
      *joined += (joined->empty() ? "" : ",") + std::string(kernel->name);
    return joined;
  }();
  return names->c_str();
}

const KernelTable& active_kernel() { return *active().load(std::memory_order_acquire); }

bool activate_kernel(const std::string& name) {
  for (const KernelTable* kernel : usable_kernels()) {
    if (name == kernel->name) {
      active().store(kernel, std::memory_order_release);
      return true;
    }
  }
  return false;
}

}  // namespace fastattention
