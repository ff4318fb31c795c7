// What an SM holds at a time: warps of CTAs, and the sub-cores that they belong to. Plain data of the timing model.
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

// A warp on its way through its part of a trace.
struct ResidentWarp {
  const Trace* trace = nullptr;
  const std::vector<Record>* records = nullptr;
  size_t position = 0;
  Cycles ready = 0;  // when its next instruction may be issued
  std::array<int, kNumScoreboards> scoreboards = {};
  int slot = 0;             // of its CTA
  int age = 0;              // CTAs launched before its own
  uint64_t generation = 0;  // tells the warps apart that have this place one after the other
  bool done = true;
  bool at_barrier = false;
  Arrival arrival;  // at which, if so

  const Record& next() const { return (*records)[position]; }
};

struct Slot {
  int warps_left = 0;
  std::array<int, kNumCtaBarriers> arrived = {};  // warps that did not wait
};

// A scoreboard that counts down.
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
  SoonestFirst<Cycles> memory_queue;  // when its entries leave
  std::vector<int> warps;
  int last = -1;  // the warp that it goes on with if it can
};

}  // namespace volta_sim

#endif
