// Placement of memory in huge pages and on NUMA nodes. Best effort: a request that cannot be met is reported, not an
// error.
#ifndef FASTATTENTION_MEMORY_H
#define FASTATTENTION_MEMORY_H

#include <cstdint>
#include <functional>
#include <vector>

#include "fastattention_cpu.h"

namespace fastattention {

// Writes zeros from the threads that will read the memory.
using Zero = std::function<void(void* address, int64_t bytes)>;

// Places [address, address + bytes) as fa_cpu_place_memory() specifies. With zero, contents are lost: pages go back to
// the kernel, and zero touches new ones. Without it, pages are moved.
fa_cpu_placement place_memory(void* address, int64_t bytes, const std::vector<int>& nodes, const Zero& zero);

}  // namespace fastattention

#endif
