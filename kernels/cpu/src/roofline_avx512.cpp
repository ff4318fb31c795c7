namespace fastattention {
namespace {
constexpr int kBytes = 64;
}
}  // namespace fastattention
// clang-format off: the loops need the width
#include "roofline_impl.h"
// clang-format on

namespace fastattention {

extern const ReadLoop kReadAvx512;
const ReadLoop kReadAvx512 = read_loop;

extern const PeakLoop kFmaAvx512;
const PeakLoop kFmaAvx512 = {"fp32_fma", kAccumulators * (kBytes / 4) * 2, fma_loop};

}  // namespace fastattention
