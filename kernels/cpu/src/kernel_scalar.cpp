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
const KernelTable kScalar = {"scalar", kTuning.row_block_elements, scratch_bytes, attend, merge, write_kv};

}  // namespace fastattention
