#include "vec_neon.h"
// clang-format off: the implementation needs the vectors
#include "kernel_impl.h"
// clang-format on

namespace fastattention {

extern const KernelTable kNeon;
const KernelTable kNeon = {"neon", scratch_bytes, attend, merge, write_kv};

}  // namespace fastattention
