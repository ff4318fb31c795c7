// Computes the time of one SM. Its 4 sub-cores each issue one warp instruction per cycle, in the order of each warp's
// trace.
#ifndef VOLTA_SIM_SM_H
#define VOLTA_SIM_SM_H

#include <vector>

#include "instruction.h"
#include "trace.h"
#include "volta_sim.h"

namespace volta_sim {

// The SM holds `resident` CTAs at a time. When one ends, the next takes its place. waits: null, or one counter per
// instruction.
fa_sim_time time_sm(const Program& program, const std::vector<const Trace*>& ctas, int resident,
                    const fa_sim_timing& timing, uint64_t* waits);

}  // namespace volta_sim

#endif
