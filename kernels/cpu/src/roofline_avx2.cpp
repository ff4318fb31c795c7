namespace fastattention {
namespace {
constexpr int kBytes = 32;
}
}  // namespace fastattention
// clang-format off: the loops need the width
#include "roofline_impl.h"
// clang-format on

namespace fastattention {

extern const ReadLoop kReadAvx2;
const ReadLoop kReadAvx2 = read_loop;

extern const PeakLoop kFmaAvx2;
const PeakLoop kFmaAvx2 = {"fp32_fma", kAccumulators * (kBytes / 4) * 2, fma_loop};

}  // namespace fastattention
