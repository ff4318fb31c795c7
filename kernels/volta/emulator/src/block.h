// A block of threads that runs on this machine: its warps in any order, the lanes of a warp from one instruction that
// they execute together to the next.
#ifndef VOLTA_EMULATOR_BLOCK_H
#define VOLTA_EMULATOR_BLOCK_H

#include <cstdint>
#include <string>
#include <vector>

#include "fiber.h"

namespace volta_emulator {

constexpr int kLanes = 32;
constexpr int kMostThreads = 1024;

struct Index {
  unsigned x, y, z;
};

// What the lanes of a warp do together.
enum class Together { kShuffle, kProductByColumns, kProductByRows, kProduct16, kLoad, kTranspose, kWarp, kBlock, kEnd };

// One lane's part in it.
struct Part {
  Together what;
  int detail;  // of kLoad: how many matrices, and 8 more where they are transposed
  uint32_t in[4], out[4];
  float sums[8];
  const unsigned char* row;
};

struct Thread {
  Fiber fiber;
  Part part;
};

struct Warp {
  std::vector<Thread> lanes;
  enum { kReady, kAtBarrier, kEnded } state;
  uint32_t barriers;  // that the warp has passed
};

struct Block {
  Index grid, size, index;
  uint32_t shared_bytes;
  std::vector<Warp> warps;
  uint32_t barriers;  // that all threads have passed
  int running;        // thread
  std::string failure;
  uint64_t random;

  Thread& thread() { return warps[running / kLanes].lanes[running % kLanes]; }
};

extern Block block;

// The running thread gets here, and goes on when its warp is done.
void do_together(Together what);

// The running thread did what is not allowed: ends the block with this sentence. Does not return.
[[noreturn]] void fail(const std::string& sentence);

std::string thread_name(int thread);  // like "thread 5 of block (0, 1, 0)"

// Of the running thread.
bool is_on_own_stack(const void* address);

}  // namespace volta_emulator

#endif
