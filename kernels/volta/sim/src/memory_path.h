// Computes when memory accesses finish, from the SM's single path to shared memory and L1, and its share of L2.
#ifndef VOLTA_SIM_MEMORY_PATH_H
#define VOLTA_SIM_MEMORY_PATH_H

#include <cstdint>

#include "instruction.h"
#include "sector_cache.h"
#include "trace.h"
#include "volta_sim.h"

namespace volta_sim {

// The cycles at which parts of an instruction are complete.
struct Completion {
  int64_t result;    // the result can be used
  int64_t operands;  // the operands have been read
  int64_t queue;     // its entry in the sub-core's memory queue is free again; 0: it had no entry
};

class MemoryPath {
 public:
  MemoryPath(const fa_sim_timing& timing, fa_sim_time& time);

  Completion shared(const Instruction& instruction, const Access& access, int64_t now);
  Completion shuffle(int64_t now);
  Completion global_load(const Trace& trace, const Access& access, int64_t now);
  Completion global_store(const Access& access, int64_t now);
  Completion local(const Instruction& instruction, int64_t now);

 private:
  int64_t enter(int64_t earliest, int64_t cycles);

  const fa_sim_timing& timing_;
  fa_sim_time& time_;
  SectorCache l1_;
  int64_t path_free_ = 0;
  double l2_free_ = 0;
};

}  // namespace volta_sim

#endif
