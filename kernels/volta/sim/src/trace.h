// The record of one CTA's execution, with the details that the timing model needs.
#ifndef VOLTA_SIM_TRACE_H
#define VOLTA_SIM_TRACE_H

#include <cstdint>
#include <vector>

namespace volta_sim {

// An access of one warp to shared or global memory.
struct Access {
  uint32_t wavefronts = 0;                     // shared: passes, given bank conflicts and width
  uint32_t first_sector = 0, num_sectors = 0;  // global: 32-byte pieces, Trace::sectors[first_sector...]
  uint32_t num_lines = 0;                      // global: 128-byte lines
};

struct Arrival {
  int barrier = 0;
  int threads = 0;  // threads that the barrier waits for; 0: all threads of the CTA
  bool waits = true;
};

struct Record {
  uint32_t instruction;
  uint32_t lanes;   // lanes that executed it
  uint32_t detail;  // index into Trace::accesses or Trace::arrivals, depending on the instruction
};

struct Trace {
  std::vector<std::vector<Record>> warps;
  std::vector<Access> accesses;
  std::vector<uint64_t> sectors;  // address / 32
  std::vector<Arrival> arrivals;
};

}  // namespace volta_sim

#endif
