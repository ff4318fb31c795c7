// The measuring loops that this machine can run. Only for translation units without -m flags.
#ifndef FASTATTENTION_ROOFLINE_CHOICE_H
#define FASTATTENTION_ROOFLINE_CHOICE_H

#include <string>
#include <vector>

#include "roofline.h"

namespace fastattention {

ReadLoop best_read_loop();  // the widest loads

const std::vector<const PeakLoop*>& usable_peaks();  // widest unit first; always includes fp32_fma
const char* usable_peak_names();                     // comma-separated

}  // namespace fastattention

#endif
