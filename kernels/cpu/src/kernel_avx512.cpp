#include "vec_avx512.h"
// clang-format off: the implementation needs the vectors
#include "kernel_impl.h"
// clang-format on

namespace fastattention {

extern const KernelTable kAvx512;
const KernelTable kAvx512 = {"avx512", scratch_bytes, attend, merge, write_kv};

}  // namespace fastattention
