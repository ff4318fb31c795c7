#include "tuning.h"
#include "vec_avx512.h"

namespace fastattention {
namespace {
constexpr Tuning kTuning = kTuningAvx512;
}
}  // namespace fastattention

#include "kernel_impl.h"

namespace fastattention {

extern const KernelTable kAvx512;
const KernelTable kAvx512 = {"avx512", FA_KERNELS};

}  // namespace fastattention
