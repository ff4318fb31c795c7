namespace fastattention {
namespace {
constexpr int kBytes = 16;
}
}  // namespace fastattention
// clang-format off: the loops need the width
#include "roofline_impl.h"
// clang-format on

namespace fastattention {

extern const ReadLoop kReadBaseline;
const ReadLoop kReadBaseline = read_loop;

extern const PeakLoop kFmaBaseline;
const PeakLoop kFmaBaseline = {"fp32_fma", kAccumulators * (kBytes / 4) * 2, fma_loop};

}  // namespace fastattention
