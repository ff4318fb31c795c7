// Checks what threads access: the tensors of a launch and their block's shared memory. The compiler inserts a call
// before each access, because kernels are compiled as if for its data race detector (-fsanitize=thread).
#ifndef VOLTA_EMULATOR_MEMORY_H
#define VOLTA_EMULATOR_MEMORY_H

#include <cstddef>
#include <cstdint>

namespace volta_emulator {

constexpr uint32_t kMaxShared = 96 * 1024;

struct Range {
  uint64_t begin, bytes;
};

void set_ranges(const Range* ranges, int count);
void reset_shared(uint32_t bytes);  // marks all of it as not written

// Checks an access that the running thread is about to make. The address must be a multiple of `alignment`.
void touch(const void* address, size_t bytes, size_t alignment, bool writes);

}  // namespace volta_emulator

#endif
