// What one CTA did, in the detail that the timing model needs.
#ifndef VOLTA_SIM_TRACE_H
#define VOLTA_SIM_TRACE_H

#include <cstdint>
#include <vector>

namespace volta_sim {

// One access of a warp to shared or global memory.
struct Access {
  uint32_t wavefronts = 0;                     // shared: passes that bank conflicts and width make of it
  uint32_t first_sector = 0, num_sectors = 0;  // global: 32-byte pieces, Trace::sectors[first_sector...]
  uint32_t num_lines = 0;                      // global: 128-byte lines
};

struct Arrival {
  int barrier = 0;
  int threads = 0;  // that the barrier waits for; 0: all of the CTA
  bool waits = true;
};

struct Record {
  uint32_t instruction;
  uint32_t lanes;   // that it took effect for
  uint32_t detail;  // index into Trace::accesses or Trace::arrivals, as the instruction has it
};

struct Trace {
  std::vector<std::vector<Record>> warps;
  std::vector<Access> accesses;
  std::vector<uint64_t> sectors;  // address / 32
  std::vector<Arrival> arrivals;
};

}  // namespace volta_sim

#endif
