#include "tuning.h"
#include "vec_avx512.h"

namespace fastattention {
namespace {
constexpr Tuning kTuning = kTuningAmx;
}
}  // namespace fastattention

#define FA_AVX512_BF16
#define FA_AMX
#include "kernel_impl.h"

namespace fastattention {

extern const KernelTable kAmx;
const KernelTable kAmx = {"amx", FA_KERNELS};

}  // namespace fastattention
