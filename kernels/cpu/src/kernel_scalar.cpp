#include "vec_scalar.h"
// clang-format off: the implementation needs the vectors
#include "kernel_impl.h"
// clang-format on

namespace fastattention {

extern const KernelTable kScalar;
const KernelTable kScalar = {"scalar", scratch_bytes, attend, merge, write_kv};

}  // namespace fastattention
