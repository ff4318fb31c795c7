// Runs one thread block on this machine. Warps run in random order. The lanes of a warp run one after another, from one
// operation that they perform together to the next.
#ifndef VOLTA_EMULATOR_BLOCK_H
#define VOLTA_EMULATOR_BLOCK_H

#include <cstdint>
#include <string>
#include <vector>

#include "fiber.h"

namespace volta_emulator {

constexpr int kLanes = 32;
constexpr int kMaxThreads = 1024;

struct Index {
  unsigned x, y, z;
};

// Operations that the lanes of a warp perform together.
enum class Together {
  kShuffle,
  kProductByColumns,
  kProductByRows,
  kProduct16,
  kLoad,
  kTranspose,
  kWarp,
  kPair,
  kBlock,
  kEnd
};

// One lane's operands and results of such an operation.
struct Part {
  Together what;
  int detail;  // kLoad: the number of matrices, plus 8 if they are transposed; kPair: the number of the barrier
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
  enum { kReady, kAtPairBarrier, kAtBarrier, kEnded } state;
  // For each warp, the time at which both last passed the same barrier. For the warp itself: any barrier.
  std::vector<uint32_t> together;
};

struct Block {
  Index grid, size, index;
  uint32_t shared_bytes;
  std::vector<Warp> warps;
  uint32_t time;        // number of barriers passed, of any kind
  uint32_t all_waited;  // the time at which all warps last passed a barrier together
  int running;          // number of the running thread
  std::string failure;
  uint64_t random;

  Thread& thread() { return warps[running / kLanes].lanes[running % kLanes]; }
};

extern Block block;

// Stops the running thread until its whole warp is here and the operation is done.
void do_together(Together what);

// Ends the block with this sentence, because the running thread did something that is not allowed. Does not return.
[[noreturn]] void fail(const std::string& sentence);

std::string thread_name(int thread);  // like "thread 5 of block (0, 1, 0)"

// Whether the address is on the running thread's stack.
bool is_on_own_stack(const void* address);

}  // namespace volta_emulator

#endif
