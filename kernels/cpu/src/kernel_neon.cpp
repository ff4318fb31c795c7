#include "tuning.h"
#include "vec_neon.h"

namespace fastattention {
namespace {
constexpr Tuning kTuning = kTuningNeon;
}
}  // namespace fastattention

#include "kernel_impl.h"

namespace fastattention {

extern const KernelTable kNeon;
const KernelTable kNeon = {"neon", FA_KERNELS};

}  // namespace fastattention
