#include "tuning.h"
#include "vec_avx2.h"

namespace fastattention {
namespace {
constexpr Tuning kTuning = kTuningAvx2;
}
}  // namespace fastattention

#include "kernel_impl.h"

namespace fastattention {

extern const KernelTable kAvx2;
const KernelTable kAvx2 = {"avx2", FA_KERNELS};

}  // namespace fastattention
