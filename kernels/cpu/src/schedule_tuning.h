// Constants that decide how work is cut and distributed. benchmarks/cpu_wake.py and "Scheduling" in the README describe
// how they were measured or computed. Constants that affect results (kSplits) may depend on the problem only.
#ifndef FASTATTENTION_SCHEDULE_TUNING_H
#define FASTATTENTION_SCHEDULE_TUNING_H

#include <stdint.h>

namespace fastattention {

// How a sequence is split along KV. Changing any of these constants changes the last bits of results.
struct SplitTuning {
  int64_t items_per_sequence;  // items that let 64 threads share one request evenly
  int64_t large_items;         // the same for items of kRowBlock rows or more, whose partial results are large
  int64_t tokens;              // mean tokens of a split, so that partial results are small compared with its K and V
  int64_t few_items;           // a sequence with fewer items than this gets shorter splits ...
  int64_t min_tokens;          // ... down to this mean number of tokens
  int64_t min_tokens_per_row;  // minimum tokens per query row, because many rows make partial results large
  int64_t row_blocks_of_sequence;  // row blocks grow only while a sequence has this many (row blocks times KV heads)
};
constexpr SplitTuning kSplits = {512, 128, 1024, 64, 256, 8, 128};

// How items reach threads. These constants do not change results.
struct PoolTuning {
  int spin_microseconds;  // polling time before a thread sleeps: an idle worker, or a caller that waits for workers
  // A thread whose polling stops for as long as the first has lost its CPU. Then no thread polls longer than
  // spin_microseconds for as long as the second.
  int stop_microseconds;
  int shared_milliseconds;
  int wake_fan_out;  // sleepers that each thread wakes, in a tree, so that no thread has to wake 100
  // A thread takes two items at a time, because it can prefetch the second one. The last items, this many per thread,
  // are taken singly.
  int64_t unreserved_items_per_thread;
  int64_t solo_multiply_adds;  // a smaller call ends before a sleeping worker could join
};
constexpr PoolTuning kPool = {50, 300, 5000, 2, 3, 256 * 1024};

// Work of one item: elements of K and V to copy, and bytes to touch first.
constexpr int64_t kMinElementsPerWrite = 32 * 1024;
constexpr int64_t kTouchBytes = int64_t{8} << 20;
// The gated delta rule: an item holds all value heads of a key head, which share its products, if each thread gets this
// many items; otherwise one value head. Either way the results are the same. The other two are channels of an item
// that keeps the convolution's inputs, and elements of an item that norms rows. kTokensPerSample: words of the
// vocabulary in an item that samples.
constexpr int64_t kDeltaItemsPerThread = 4;
constexpr int kChannelsPerItem = 4096;
constexpr int kTokensPerSample = 8 * 1024;
// Linear layers: rows of the weight in an item are a multiple of the first, at least this many items for each thread if
// there are enough rows. The other is tokens of an item that converts inputs.
constexpr int kLinearRows = 24;
constexpr int kLinearItemsPerThread = 4;
constexpr int kTokensPerArrangement = 32;
constexpr int64_t kElementsPerRotation = 32 * 1024;
constexpr int64_t kElementsPerNorm = 32 * 1024;

}  // namespace fastattention

#endif
