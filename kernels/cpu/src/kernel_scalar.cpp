#include "tuning.h"
#include "vec_scalar.h"

namespace fastattention {
namespace {
constexpr Tuning kTuning = kTuningScalar;
}
}  // namespace fastattention

#include "kernel_impl.h"

namespace fastattention {

extern const KernelTable kScalar;
const KernelTable kScalar = {"scalar", FA_KERNELS};

}  // namespace fastattention
