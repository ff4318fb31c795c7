#include "vec_avx2.h"
// clang-format off: the implementation needs the vectors
#include "kernel_impl.h"
// clang-format on

namespace fastattention {

extern const KernelTable kAvx2;
const KernelTable kAvx2 = {"avx2", scratch_bytes, attend, merge, write_kv};

}  // namespace fastattention
