// Counts the transactions of a warp's memory access.
#ifndef VOLTA_SIM_ACCESS_H
#define VOLTA_SIM_ACCESS_H

#include <array>
#include <cstdint>
#include <vector>

#include "trace.h"

namespace volta_sim {

constexpr int kLanes = 32;

// Shared memory has 32 banks of 4 bytes. Accesses of 8 and 16 bytes are made by half and quarter warps. In one pass, a
// bank delivers one word to all lanes that read it.
Access shared_access(uint32_t lanes, const std::array<uint32_t, kLanes>& addresses, int width);

// Every lane's access is aligned and therefore lies in one sector. Appends the distinct sectors, ordered by address.
Access global_access(uint32_t lanes, const std::array<uint64_t, kLanes>& addresses, std::vector<uint64_t>& sectors);

}  // namespace volta_sim

#endif
