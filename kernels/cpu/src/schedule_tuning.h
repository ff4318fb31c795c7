// Numbers that decide how work is cut and handed out; benchmarks/cpu_wake.py and the README's "Scheduling" say what
// they were measured or computed against. Those that shape results (kSplits) may depend on nothing but the problem.
#ifndef FASTATTENTION_SCHEDULE_TUNING_H
#define FASTATTENTION_SCHEDULE_TUNING_H

#include <stdint.h>

namespace fastattention {

// How a sequence is split along KV. Changing any of these changes the last bits of results.
struct SplitTuning {
  int64_t items_per_sequence;  // enough for 64 threads to share one request evenly
  int64_t large_items;         // the same where they are of kRowBlock rows or more, and so are their partial results
  int64_t tokens;              // mean length of a split, so that partial results stay small against its K and V
  int64_t few_items;           // a sequence with fewer than this is split into shorter ones ...
  int64_t min_tokens;          // ... down to this mean length
  int64_t min_tokens_per_row;  // the same where many query rows make partial results large
  int64_t row_blocks_of_sequence;  // times KV heads; row blocks do not grow to where there are fewer
};
constexpr SplitTuning kSplits = {512, 128, 1024, 64, 256, 8, 128};

// How items reach threads. None of these changes results.
struct PoolTuning {
  int spin_microseconds;  // how long an idle worker, or a caller whose workers are not done, polls before it sleeps
  int wake_fan_out;       // sleepers that each thread wakes: a tree, so that no one wakes 100
  // A thread that knows its next item fetches its start in time, so it takes two; not so many items before the end.
  int64_t unreserved_items_per_thread;
  int64_t solo_multiply_adds;  // a call of less than this is done before a sleeping worker could join
};
constexpr PoolTuning kPool = {50, 2, 3, 256 * 1024};

// Shared memory work: elements of K and V copied by one item, and bytes first touched by one item.
constexpr int64_t kMinElementsPerWrite = 32 * 1024;
constexpr int64_t kTouchBytes = int64_t{8} << 20;

}  // namespace fastattention

#endif
