#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>

namespace fastattention {

extern const KernelTable kScalar;
#if defined(__x86_64__)
extern const KernelTable kAmx;
extern const KernelTable kAvx512Bf16;
extern const KernelTable kAvx512;
extern const KernelTable kAvx2;
#elif defined(__aarch64__)
extern const KernelTable kNeon;
#endif

namespace {

#if defined(__x86_64__)
#if defined(FASTATTENTION_EMULATE_AMX)
bool has_amx() { return true; }
#else
// Tiles are 8 KiB of state per thread. Linux (since 5.16) saves them only for processes that have requested permission,
// which also covers threads that already exist.
bool has_amx() {
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kTile = 1u << 24, kBf16 = 1u << 22;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & (kTile | kBf16)) != (kTile | kBf16)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif
#endif

std::vector<const KernelTable*> detect() {
  std::vector<const KernelTable*> kernels;
#if defined(__x86_64__)
  __builtin_cpu_init();  // the builtins also check that the operating system saves the wide registers
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#if defined(FASTATTENTION_EMULATE_AVX512)
  const bool avx512 = avx2, bf16 = avx2, vbmi = avx2;
#else
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  const bool vbmi = avx512 && __builtin_cpu_supports("avx512vbmi");  // all processors with AMX have it
#endif
  if (avx512) {
    // On AMD's Zen 4 the bf16 dot product runs at twice the rate of fp32 multiply-adds. On Intel's Sapphire and Emerald
    // Rapids it runs at half the rate (88 against 178 GFLOPS per core), and bf16 is faster only with AMX.
    const bool bf16_is_faster = __builtin_cpu_is("amd");
    if (bf16 && vbmi && has_amx()) kernels.push_back(&kAmx);
    if (bf16 && bf16_is_faster) kernels.push_back(&kAvx512Bf16);
    kernels.push_back(&kAvx512);
    if (bf16 && !bf16_is_faster) kernels.push_back(&kAvx512Bf16);
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

// Never destroyed, because a daemon thread may make its first call while the process ends.
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
