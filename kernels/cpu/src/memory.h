// Where memory lies: huge pages, and NUMA nodes. Best effort: what cannot be had is said, and never an error.
#ifndef FASTATTENTION_MEMORY_H
#define FASTATTENTION_MEMORY_H

#include <cstdint>
#include <functional>
#include <vector>

#include "fastattention_cpu.h"

namespace fastattention {

// From the threads that will read: writes zeros.
using Zero = std::function<void(void* address, int64_t bytes)>;

// Places [address, address + bytes) as fa_cpu_place_memory() says. With zero, contents are given up: pages go back to
// the kernel and are touched again by zero; without, they are moved.
fa_cpu_placement place_memory(void* address, int64_t bytes, const std::vector<int>& nodes, const Zero& zero);

}  // namespace fastattention

#endif
