// The resident warps of an SM and its sub-cores: plain data of the timing model.
#ifndef VOLTA_SIM_RESIDENT_H
#define VOLTA_SIM_RESIDENT_H

#include <array>
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "trace.h"
#include "warp.h"

namespace volta_sim {

constexpr int kSubCores = 4;

using Cycles = int64_t;

// A warp and its position in its part of a trace.
struct ResidentWarp {
  const Trace* trace = nullptr;
  const std::vector<Record>* records = nullptr;
  size_t position = 0;
  Cycles ready = 0;  // cycle from which its next instruction may be issued
  std::array<int, kNumScoreboards> scoreboards = {};
  int slot = 0;             // slot of its CTA
  int age = 0;              // number of CTAs launched before its own
  uint64_t generation = 0;  // distinguishes warps that use this place one after another
  bool done = true;
  bool at_barrier = false;
  Arrival arrival;  // the barrier at which it waits

  const Record& next() const { return (*records)[position]; }
};

struct Slot {
  int warps_left = 0;
  std::array<int, kNumCtaBarriers> arrived = {};  // warps that arrived without waiting
};

// The decrement of a scoreboard.
struct Event {
  Cycles when;
  int warp;
  uint64_t generation;
  int scoreboard;
  bool operator>(const Event& other) const { return when > other.when; }
};

template <typename T>
using SoonestFirst = std::priority_queue<T, std::vector<T>, std::greater<T>>;

struct SubCore {
  std::array<Cycles, kNumPipes> pipe_free = {};
  SoonestFirst<Cycles> memory_queue;  // cycles at which its entries leave
  std::vector<int> warps;
  int last = -1;  // the warp that it prefers for the next instruction; -1: none
};

}  // namespace volta_sim

#endif
