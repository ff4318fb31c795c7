#include "memory_path.h"

#include <algorithm>

namespace volta_sim {
namespace {

constexpr int kSectorBytes = 32;
// Cycles from issue to the path, which are part of the latencies.
constexpr int kToShared = 4, kToL1 = 6;

int64_t data_cycles(const Access& access, int bytes_per_cycle) {
  const auto bytes = static_cast<int64_t>(access.num_sectors) * kSectorBytes;
  // Each 128-byte line needs its own tag lookup.
  return std::max<int64_t>((bytes + bytes_per_cycle - 1) / bytes_per_cycle, access.num_lines);
}

}  // namespace

MemoryPath::MemoryPath(const fa_sim_timing& timing, fa_sim_time& time)
    : timing_(timing), time_(time), l1_(static_cast<size_t>(timing.l1_kib) * 1024 / kSectorBytes) {}

// Occupies the path for `cycles` cycles, not before `earliest`. Returns the first of them.
int64_t MemoryPath::enter(int64_t earliest, int64_t cycles) {
  const int64_t begin = std::max(earliest, path_free_);
  path_free_ = begin + cycles;
  return begin;
}

Completion MemoryPath::shared(const Instruction& instruction, const Access& access, int64_t now) {
  const Cost cost = instruction.opcode->cost;
  int64_t cycles = access.wavefronts;
  // A wide load returns one register per cycle, even if all lanes read the same words.
  if (cost == Cost::kSharedLoad) cycles = std::max<int64_t>(cycles, instruction.width / 4);
  if (cost == Cost::kSharedAtomic) cycles *= 2;  // read and write
  const int64_t begin = enter(now + kToShared, cycles);
  time_.shared_busy += static_cast<double>(cycles);
  const int64_t stored = cost == Cost::kSharedStore ? cycles : 0;
  return {begin + cycles - 1 + timing_.shared_load_latency - kToShared, begin + 2 + stored, begin + 1};
}

Completion MemoryPath::shuffle(int64_t now) {
  const int64_t begin = enter(now + kToShared, 1);
  time_.shared_busy += 1;
  return {begin + timing_.shuffle_latency - kToShared, begin + 2, begin + 1};
}

Completion MemoryPath::global_load(const Trace& trace, const Access& access, int64_t now) {
  const int64_t cycles = data_cycles(access, timing_.l1_bytes_per_cycle);
  const int64_t begin = enter(now + kToL1, cycles);
  time_.shared_busy += static_cast<double>(cycles);
  int64_t missing = 0;
  for (uint32_t i = 0; i < access.num_sectors; ++i)
    missing += l1_.touch(trace.sectors[access.first_sector + i]) ? 0 : 1;
  time_.l1_hits += static_cast<double>(access.num_sectors - missing);
  time_.l1_misses += static_cast<double>(missing);
  int64_t result = begin + cycles + timing_.l1_latency - kToL1;
  if (missing > 0) {
    const auto bytes = static_cast<double>(missing * kSectorBytes);
    l2_free_ = std::max(static_cast<double>(begin), l2_free_) + bytes / timing_.l2_bytes_per_cycle;
    time_.l2_bytes += bytes;
    result = static_cast<int64_t>(l2_free_) + timing_.l2_latency;
  }
  return {result, begin + cycles, begin + 1};
}

// Stores write through to L2, and no instruction waits for that.
Completion MemoryPath::global_store(const Access& access, int64_t now) {
  const int64_t cycles = data_cycles(access, timing_.store_bytes_per_cycle);
  const int64_t begin = enter(now + kToL1, cycles);
  const auto bytes = static_cast<double>(access.num_sectors) * kSectorBytes;
  l2_free_ = std::max(static_cast<double>(begin), l2_free_) + bytes / timing_.l2_bytes_per_cycle;
  time_.l2_bytes += bytes;
  return {begin + cycles, begin + cycles, begin + 1};
}

// Local memory holds spilled registers. It is assumed to be always in L1.
Completion MemoryPath::local(const Instruction& instruction, int64_t now) {
  const int64_t cycles = std::max(1, instruction.width / 4) * 2;
  const int64_t begin = enter(now + kToL1, cycles);
  time_.shared_busy += static_cast<double>(cycles);
  return {begin + cycles + timing_.l1_latency - kToL1, begin + cycles, begin + 1};
}

}  // namespace volta_sim
