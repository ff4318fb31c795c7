// Parameters of sums over GPUs by push: plain data with the same layout in the launcher and on the device.
#ifndef FASTATTENTION_VOLTA_PUSH_H
#define FASTATTENTION_VOLTA_PUSH_H

namespace fastattention {

// out = the sum of all ranks' x, in chunks of 8 bytes. Each rank has a board that the others can write:
// [2, ranks, slots, 16 bytes], zero at the start. All ranks make the same calls in the same order.
struct Push {
  const void* x;    // 8 bytes aligned
  void* out;        // 8 bytes aligned; may be x
  unsigned* calls;  // [CTAs]: the number of calls before this one, zero at the start
  unsigned* late;   // set to 1 if a chunk did not come, or null
  void* board0;     // those of all ranks, as this one addresses them
  void* board1;
  void* board2;
  void* board3;
  void* board4;
  void* board5;
  void* board6;
  void* board7;
  int chunks, slots;  // chunks of this call, at most slots
  int rank, ranks;
  int looks;  // how often a thread looks for a chunk before it gives up; 0 = for ever
};

}  // namespace fastattention

#endif
