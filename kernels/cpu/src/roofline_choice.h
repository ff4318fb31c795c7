// Which of the measuring loops this machine can run. For translation units without -m flags only.
#ifndef FASTATTENTION_ROOFLINE_CHOICE_H
#define FASTATTENTION_ROOFLINE_CHOICE_H

#include <string>
#include <vector>

#include "roofline.h"

namespace fastattention {

ReadLoop best_read_loop();  // the widest loads

const std::vector<const PeakLoop*>& usable_peaks();  // widest unit first; fp32_fma is always among them
const char* usable_peak_names();                     // comma-separated

}  // namespace fastattention

#endif
