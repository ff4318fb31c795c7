#include "memory.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "block.h"

// The array that kernels declare as `extern __shared__ uint4 shared[]` in functions with C linkage.
extern "C" {
alignas(16) unsigned char shared[volta_emulator::kMaxShared];
}

namespace volta_emulator {
namespace {

std::vector<Range> tensors;

// The last accesses to two bytes of shared memory that no barrier has ordered before a later one. If two threads access
// them and one writes, both must have passed a barrier in between: of the warp for threads of one warp, otherwise of
// the two warps or of the block.
constexpr int kNobody = -1, kMany = -2;
struct Access {
  uint32_t warps = 0;    // a bit for each warp
  int thread = kNobody;  // kMany: several
  uint32_t time = 0;     // of the latest one

  bool is_before(int warp, int other) const { return block.warps[other].together[warp] > time; }
  bool conflicts(int other) const {
    if (warps == 0 || time < block.all_waited || thread == other) return false;
    for (uint32_t left = warps; left != 0; left &= left - 1) {
      if (!is_before(__builtin_ctz(left), other / kLanes)) return true;
    }
    return false;
  }
  void add(int other) {
    const int warp = other / kLanes;
    if (time < block.all_waited) warps = 0;
    for (uint32_t left = warps; left != 0; left &= left - 1) {
      if (is_before(__builtin_ctz(left), warp)) warps &= ~(left & -left);
    }
    thread = warps == 0 || thread == other ? other : kMany;
    warps |= 1u << warp;
    time = block.time;
  }
};
struct Cell {
  Access write, read;
};
constexpr size_t kCell = 2;
Cell cells[kMaxShared / kCell];

std::string access_name(size_t bytes, bool writes) {
  return thread_name(block.running) + (writes ? " writes " : " reads ") + std::to_string(bytes) + " bytes ";
}

void touch_shared(size_t at, size_t bytes, bool writes) {
  if (at + bytes > block.shared_bytes) {
    fail(access_name(bytes, writes) + "at " + std::to_string(at) + " of shared memory, which has only " +
         std::to_string(block.shared_bytes) + " bytes.");
  }
  for (size_t i = at / kCell; i <= (at + bytes - 1) / kCell; ++i) {
    Cell& cell = cells[i];
    if (!writes && cell.write.warps == 0) {
      fail(access_name(bytes, writes) + "at " + std::to_string(at) + " of shared memory, which has not been written.");
    }
    const bool after_write = cell.write.conflicts(block.running);
    if (after_write || (writes && cell.read.conflicts(block.running))) {
      const int other = after_write ? cell.write.thread : cell.read.thread;
      fail(access_name(bytes, writes) + "at " + std::to_string(at) + " of shared memory with no barrier since " +
           (other < 0 ? "several threads" : "thread " + std::to_string(other)) + (after_write ? " wrote" : " read") +
           " there.");
    }
    (writes ? cell.write : cell.read).add(block.running);
  }
}

}  // namespace

void set_ranges(const Range* ranges, int count) {
  tensors.assign(ranges, ranges + count);
  std::sort(tensors.begin(), tensors.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
}

void reset_shared(uint32_t bytes) {
  std::memset(::shared, 0xff, bytes);
  std::fill(cells, cells + bytes / kCell, Cell());
}

void touch(const void* address, size_t bytes, size_t alignment, bool writes) {
  if (is_on_own_stack(address)) return;
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (at % alignment != 0) {
    fail(access_name(bytes, writes) + "at an address that is not a multiple of " + std::to_string(alignment) + ".");
  }
  const auto begin = reinterpret_cast<uintptr_t>(::shared);
  if (at >= begin && at < begin + kMaxShared) return touch_shared(at - begin, bytes, writes);
  auto after = std::upper_bound(tensors.begin(), tensors.end(), at,
                                [](uintptr_t value, const Range& range) { return value < range.begin; });
  if (after == tensors.begin() || at + bytes > (after - 1)->begin + (after - 1)->bytes) {
    fail(access_name(bytes, writes) + "outside of all tensors.");
  }
}

}  // namespace volta_emulator

// Functions that the compiler calls before each access.
extern "C" {
#define VOLTA_EMULATOR_ACCESS(size)                                                                      \
  void __tsan_read##size(void* address) { volta_emulator::touch(address, size, size, false); }           \
  void __tsan_write##size(void* address) { volta_emulator::touch(address, size, size, true); }           \
  void __tsan_unaligned_read##size(void* address) { volta_emulator::touch(address, size, size, false); } \
  void __tsan_unaligned_write##size(void* address) { volta_emulator::touch(address, size, size, true); }
VOLTA_EMULATOR_ACCESS(1)
VOLTA_EMULATOR_ACCESS(2)
VOLTA_EMULATOR_ACCESS(4)
VOLTA_EMULATOR_ACCESS(8)
VOLTA_EMULATOR_ACCESS(16)
void __tsan_read_range(void* address, size_t bytes) { volta_emulator::touch(address, bytes, 1, false); }
void __tsan_write_range(void* address, size_t bytes) { volta_emulator::touch(address, bytes, 1, true); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void) {}
void __tsan_init(void) {}
}
