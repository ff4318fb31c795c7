#include "block.h"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>

#include "memory.h"
#include "warp.h"

namespace volta_emulator {

Block block;

namespace {

constexpr size_t kStackBytes = 64 << 10;

void (*kernel)(const void*);
const void* parameters;

unsigned char* stacks() {
  static auto* const memory = [] {
    const size_t bytes = kMaxThreads * kStackBytes;
    void* const all = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return static_cast<unsigned char*>(nullptr);
    return static_cast<unsigned char*>(all);
  }();
  return memory;
}

void run_thread() {
  kernel(parameters);
  do_together(Together::kEnd);
}

uint64_t random() {  // xorshift64
  block.random ^= block.random << 13;
  block.random ^= block.random >> 7;
  block.random ^= block.random << 17;
  return block.random;
}

const char* name(Together what) {
  switch (what) {
    case Together::kShuffle:
      return "at a shuffle";
    case Together::kProductByColumns:
    case Together::kProductByRows:
    case Together::kProduct16:
      return "at a matrix product";
    case Together::kLoad:
      return "at a load of matrices";
    case Together::kTranspose:
      return "at a transposition";
    case Together::kWarp:
      return "at a barrier of the warp";
    case Together::kPair:
      return "at a barrier of two warps";
    case Together::kBlock:
      return "at a barrier of the block";
    case Together::kEnd:
      return "at its end";
  }
  return "";
}

// Lets a warp at a barrier of two warps continue, and the warp that waits there already.
void release_pair(int number) {
  Warp& warp = block.warps[number];
  for (size_t i = 0; i < block.warps.size(); ++i) {
    Warp& other = block.warps[i];
    if (&other == &warp || other.state != Warp::kAtPairBarrier ||
        other.lanes[0].part.detail != warp.lanes[0].part.detail) {
      continue;
    }
    ++block.time;
    warp.together[i] = warp.together[number] = other.together[i] = other.together[number] = block.time;
    warp.state = other.state = Warp::kReady;
    return;
  }
}

// Runs all lanes to the next operation that they perform together, and performs it.
void step(int number) {
  Warp& warp = block.warps[number];
  const bool backwards = random() >> 32 & 1;
  const int lanes = static_cast<int>(warp.lanes.size());
  for (int i = 0; i < lanes; ++i) {
    block.running = number * kLanes + (backwards ? lanes - 1 - i : i);
    block.thread().fiber.resume();
    if (!block.failure.empty()) return;
  }
  const Part& first = warp.lanes[0].part;
  for (int lane = 1; lane < lanes; ++lane) {
    const Part& part = warp.lanes[lane].part;
    if (part.what != first.what || part.detail != first.detail) {
      block.failure = thread_name(number * kLanes + lane) + " is " + name(part.what) + ", but thread " +
                      std::to_string(number * kLanes) + " of its warp is " + name(first.what) +
                      (part.what == first.what ? " of another kind." : ".");
      return;
    }
  }
  if (first.what == Together::kEnd) {
    warp.state = Warp::kEnded;
  } else if (first.what == Together::kBlock) {
    warp.state = Warp::kAtBarrier;
  } else if (first.what == Together::kPair) {
    warp.state = Warp::kAtPairBarrier;
    release_pair(number);
  } else if (first.what == Together::kWarp) {
    warp.together[number] = ++block.time;
  } else if (lanes < kLanes) {
    block.failure = thread_name(number * kLanes) + " is " + name(first.what) + ", but its warp has only " +
                    std::to_string(lanes) + " threads.";
  } else {
    execute(warp);
  }
}

void run() {
  std::vector<int> ready;
  while (block.failure.empty()) {
    ready.clear();
    for (size_t i = 0; i < block.warps.size(); ++i) {
      if (block.warps[i].state == Warp::kReady) ready.push_back(static_cast<int>(i));
    }
    if (ready.empty()) {
      const auto at = [](int state) { return [state](const Warp& warp) { return warp.state == state; }; };
      const auto alone = std::find_if(block.warps.begin(), block.warps.end(), at(Warp::kAtPairBarrier));
      if (alone != block.warps.end()) {
        block.failure = thread_name(static_cast<int>(alone - block.warps.begin()) * kLanes) +
                        " is at a barrier of two warps, but no other warp reaches it.";
        return;
      }
      const auto ended = std::find_if(block.warps.begin(), block.warps.end(), at(Warp::kEnded));
      const auto waits = std::find_if(block.warps.begin(), block.warps.end(), at(Warp::kAtBarrier));
      if (waits == block.warps.end()) return;
      if (ended != block.warps.end()) {
        block.failure = thread_name(static_cast<int>(waits - block.warps.begin()) * kLanes) +
                        " is at a barrier of the block, but thread " +
                        std::to_string((ended - block.warps.begin()) * kLanes) + " has ended.";
        return;
      }
      block.all_waited = ++block.time;
      for (Warp& warp : block.warps) {
        warp.state = Warp::kReady;
        std::fill(warp.together.begin(), warp.together.end(), block.time);
      }
      continue;
    }
    const int number = ready[(random() >> 32) % ready.size()];
    // Some warps get far ahead of the others, some do not.
    const int steps = 1 << ((random() >> 32) % 12);
    for (int i = 0; i < steps && block.warps[number].state == Warp::kReady && block.failure.empty(); ++i) step(number);
  }
}

}  // namespace

void do_together(Together what) {
  Thread& thread = block.thread();
  thread.part.what = what;
  thread.fiber.stop();
}

void fail(const std::string& sentence) {
  block.failure = sentence;
  for (;;) block.thread().fiber.stop();
}

std::string thread_name(int thread) {
  const Index& at = block.index;
  return "thread " + std::to_string(thread) + " of block (" + std::to_string(at.x) + ", " + std::to_string(at.y) +
         ", " + std::to_string(at.z) + ")";
}

bool is_on_own_stack(const void* address) {
  const auto* at = static_cast<const unsigned char*>(address);
  const unsigned char* const own = stacks() + block.running * kStackBytes;
  return at >= own && at < own + kStackBytes;
}

}  // namespace volta_emulator

// Runs one block of a kernel that kernel.cpp exports. `ranges`: the memory that its threads may access. Returns null on
// success, otherwise one sentence that describes the error, valid until the next call.
extern "C" __attribute__((visibility("default"))) const char* fa_emulator_run(
    void (*kernel)(const void*), const void* parameters, const unsigned* grid, const unsigned* size,
    const unsigned* index, unsigned shared_bytes, const volta_emulator::Range* ranges, int num_ranges,
    unsigned long long seed) {
  using namespace volta_emulator;
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const unsigned threads = size[0] * size[1] * size[2];
  block.failure.clear();
  if (threads == 0 || threads > kMaxThreads) {
    block.failure = "a block has " + std::to_string(threads) + " threads, but can have 1 to 1024.";
  } else if (size[1] != 1 || size[2] != 1) {
    block.failure = "the emulator runs one-dimensional blocks only.";
  } else if (shared_bytes > kMaxShared) {
    block.failure = "a block has at most 98304 bytes of shared memory, not " + std::to_string(shared_bytes) + ".";
  } else if (stacks() == nullptr) {
    block.failure = "there is not enough memory for the stacks of a block's threads.";
  }
  if (!block.failure.empty()) return block.failure.c_str();
  volta_emulator::kernel = kernel;
  volta_emulator::parameters = parameters;
  block.grid = {grid[0], grid[1], grid[2]};
  block.size = {size[0], size[1], size[2]};
  block.index = {index[0], index[1], index[2]};
  block.shared_bytes = shared_bytes;
  block.time = block.all_waited = 0;
  block.random = seed * 2654435761u + 88172645463325252u;
  set_ranges(ranges, num_ranges);
  reset_shared(shared_bytes);
  block.warps.resize((threads + kLanes - 1) / kLanes);
  for (size_t i = 0; i < threads; ++i) {
    Warp& warp = block.warps[i / kLanes];
    if (i % kLanes == 0)
      warp.lanes.resize(std::min<size_t>(kLanes, threads - i)), warp.state = Warp::kReady,
                                                                warp.together.assign(block.warps.size(), 0);
    unsigned char* const stack = stacks() + i * kStackBytes;
    warp.lanes[i % kLanes].fiber.start(stack, kStackBytes, run_thread);
  }
  run();
  return block.failure.empty() ? nullptr : block.failure.c_str();
}
