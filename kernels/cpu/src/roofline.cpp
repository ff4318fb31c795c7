#include "roofline.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "roofline_choice.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fastattention {

extern const ReadLoop kReadBaseline;
extern const PeakLoop kFmaBaseline;
#if defined(__x86_64__)
extern const ReadLoop kReadAvx2, kReadAvx512;
extern const PeakLoop kFmaAvx2, kFmaAvx512, kDotAvx512Bf16, kAmxBf16;
#endif

namespace {

struct Machine {
  bool avx2 = false, avx512 = false, avx512_bf16 = false, amx_bf16 = false;
};

#if defined(__x86_64__)
// Linux grants tile registers only to processes that request them. The permission holds for all threads.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

Machine detect() {
  Machine machine;
#if defined(__x86_64__)
  __builtin_cpu_init();  // the builtins also check that the operating system saves the wide registers
  machine.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  machine.avx512 = machine.avx2 && __builtin_cpu_supports("avx512f");
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) machine.avx512_bf16 = machine.avx512 && (eax >> 5 & 1) != 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
    const bool tile = (edx >> 24 & 1) != 0, bf16 = (edx >> 22 & 1) != 0;
    machine.amx_bf16 = tile && bf16 && may_use_tiles();
  }
#endif
  return machine;
}

[[maybe_unused]] const Machine& machine() {  // used on x86-64 only
  static const Machine found = detect();
  return found;
}

}  // namespace

ReadLoop best_read_loop() {
#if defined(__x86_64__)
  if (machine().avx512) return kReadAvx512;
  if (machine().avx2) return kReadAvx2;
#endif
  return kReadBaseline;
}

const std::vector<const PeakLoop*>& usable_peaks() {
  static const auto* loops = [] {
    auto* found = new std::vector<const PeakLoop*>;
#if defined(__x86_64__)
    if (machine().amx_bf16) found->push_back(&kAmxBf16);
    if (machine().avx512_bf16) found->push_back(&kDotAvx512Bf16);
    found->push_back(machine().avx512 ? &kFmaAvx512 : machine().avx2 ? &kFmaAvx2 : &kFmaBaseline);
#else
    found->push_back(&kFmaBaseline);
#endif
    return found;
  }();
  return *loops;
}

const char* usable_peak_names() {
  static const std::string* names = [] {
    auto* joined = new std::string;
    for (const PeakLoop* loop : usable_peaks()) *joined += (joined->empty() ? "" : ",") + std::string(loop->name);
    return joined;
  }();
  return names->c_str();
}

}  // namespace fastattention
