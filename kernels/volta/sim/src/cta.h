// Runs one CTA. Its warps take turns, each until it waits or ends.
#ifndef VOLTA_SIM_CTA_H
#define VOLTA_SIM_CTA_H

#include "step.h"

namespace volta_sim {

// trace: null, or receives the trace. limit: instructions of one warp after which it is considered endless.
void run_cta(const Program& program, Machine& machine, uint32_t x, uint32_t y, uint32_t z, uint64_t limit,
             Trace* trace);

}  // namespace volta_sim

#endif
