#include "tuning.h"
#include "vec_avx512.h"

namespace fastattention {
namespace {
constexpr Tuning kTuning = kTuningAvx512Bf16;
}
}  // namespace fastattention

#define FA_AVX512_BF16
#include "kernel_impl.h"

namespace fastattention {

extern const KernelTable kAvx512Bf16;
const KernelTable kAvx512Bf16 = {"avx512_bf16", FA_KERNELS};

}  // namespace fastattention
