// The state of one warp and of its CTA.
#ifndef VOLTA_SIM_WARP_H
#define VOLTA_SIM_WARP_H

#include <array>
#include <cstdint>
#include <vector>

#include "access.h"
#include "instruction.h"

namespace volta_sim {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kNumRegisters = 256;  // the last one is RZ
constexpr int kNumConvergenceBarriers = 16;
constexpr int kNumCtaBarriers = 16;

// One value per lane. Operations compute all 32 values, but only lanes whose guard holds are written.
using Lanes = std::array<uint32_t, kLanes>;
using WideLanes = std::array<uint64_t, kLanes>;

inline bool has_lane(uint32_t lanes, int lane) { return (lanes >> lane & 1) != 0; }

// Lanes that continue at the same address.
struct Group {
  uint32_t address;
  uint32_t lanes;
};

// Lanes that wait for other lanes of their warp at an instruction.
struct Meeting {
  uint32_t address;
  uint32_t lanes;
  uint32_t expected;  // lanes that must arrive, except those that have exited
  int barrier;        // convergence barrier, or -1 for WARPSYNC
};

struct Warp {
  int number = 0;
  uint32_t alive = 0;
  std::array<Lanes, kNumRegisters> registers = {};
  std::array<uint32_t, 8> predicates = {};  // a bit per lane; PT stays set
  std::array<Lanes, kNumConvergenceBarriers> convergence = {};
  std::vector<uint8_t> local;  // local_bytes per lane

  std::vector<Group> groups;      // groups that can run
  std::vector<Meeting> meetings;  // groups that wait for lanes of this warp
  std::vector<Group> at_barrier;  // groups that wait for other warps, at cta_barrier
  int cta_barrier = 0;
  int barrier_threads = 0;    // as given by the instruction; 0: all
  std::vector<int> arrivals;  // barriers at which this warp has arrived without waiting, not yet counted by its CTA
  uint64_t instructions = 0;  // executed so far

  void write(int index, uint32_t lanes, const Lanes& values) {
    if (index == kZeroRegister) return;
    Lanes& target = registers[static_cast<size_t>(index)];
    for (size_t lane = 0; lane < kLanes; ++lane) target[lane] = (lanes >> lane & 1) != 0 ? values[lane] : target[lane];
  }
  void write_predicate(int index, uint32_t lanes, uint32_t values) {
    if (index == kTruePredicate) return;
    uint32_t& target = predicates[static_cast<size_t>(index)];
    target = (target & ~lanes) | (values & lanes);
  }
};

struct Cta {
  uint32_t x = 0, y = 0, z = 0;
  std::vector<uint8_t> shared;
  std::vector<Warp> warps;
  std::array<int, kNumCtaBarriers> arrived = {};  // threads that arrived by BAR.ARV
};

}  // namespace volta_sim

#endif
