// How many transactions the addresses of a warp make.
#ifndef VOLTA_SIM_ACCESS_H
#define VOLTA_SIM_ACCESS_H

#include <array>
#include <cstdint>
#include <vector>

#include "trace.h"

namespace volta_sim {

constexpr int kLanes = 32;

// 32 banks of 4 bytes. Accesses of 8 and 16 bytes go by half and quarter warps; in each, a bank yields one word per
// pass to everyone who wants that word.
Access shared_access(uint32_t lanes, const std::array<uint32_t, kLanes>& addresses, int width);

// An aligned access lies in one sector. Appends the distinct ones, in the order of their addresses, to `sectors`.
Access global_access(uint32_t lanes, const std::array<uint64_t, kLanes>& addresses, std::vector<uint64_t>& sectors);

}  // namespace volta_sim

#endif
