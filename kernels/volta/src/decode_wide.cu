// Attention of 9 to 32 packed rows: the tokens of a speculative step, or many query heads per KV head. As in decode.cu,
// a sequence is split into parts, and the time goes into reading keys and values once. The output of 32 rows does not
// fit into a warp's registers, so the warps of a block share each tile of keys and have eight rows each. Warps without
// rows only load.
#include "cache.cuh"

#ifndef HEAD_SIZE
#define HEAD_SIZE 128
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 2
#endif

namespace fastattention {

constexpr int kWarps = WARPS;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpRows = 8;
constexpr int kRows = kWarpRows * kWarps;
constexpr int kTile = 32;                                           // keys
constexpr int kChunks = HEAD_SIZE / 8;                              // of 8 numbers
constexpr int kPitch = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;  // chunks from row to row
constexpr int kRowsOfPass = 32 / kPitch;                            // that a warp loads at once
constexpr int kPasses = kTile / kRowsOfPass / kWarps;
using WarpLane = DecodeLane<HEAD_SIZE, kPitch, true>;
constexpr int kOutputs = WarpLane::kOutputs, kElements = WarpLane::kElements;

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM) fa_volta_decode_wide(const Split s) {
  extern __shared__ uint4 shared[];
  const AttentionParams& p = s.problem;
  const int seq = blockIdx.y, part = blockIdx.z, kv_head = blockIdx.x;
  const int kv_len = p.seq_lens[seq], length = part_length(kv_len, s.min_parts);
  const int first_token = p.query_start_loc[seq], q_len = p.query_start_loc[seq + 1] - first_token;
  const int group = p.group.divisor, num_rows = q_len * group, offset = kv_len - q_len;
  const auto begin_of = [&](int position) { return p.window_left < 0 ? 0 : max(0, position - p.window_left); };
  const int part_end = min((part + 1) * length, kv_len);
  const int last_key =
      p.window_right < 0 ? part_end : max(0, min(part_end, offset + q_len + p.window_right));  // the last row's end
  const auto end_of = [&](int position) {
    return p.window_right < 0 ? last_key : min(last_key, position + p.window_right + 1);
  };
  const int first_key = max(part * length, begin_of(offset));
  if (part * length >= kv_len) return;

  const int warp = threadIdx.x / 32, first_row = warp * kWarpRows;
  const WarpLane lane(threadIdx.x & 31);
  uint4* const queries = shared + first_row * kPitch;  // of this warp
  uint4* const keys = shared + kRows * kPitch;
  uint4* const values = keys + kTile * kPitch;

  // Each lane knows where one key of the tile lies.
  const bool paged = p.block_table != nullptr;
  const u32 pages = seq * static_cast<u32>(p.block_table_stride);
  const u32 block_stride = p.kv_block_stride / 8, token_stride = p.kv_token_stride / 8;
  const u32 first = (paged ? 0 : p.kv_start_loc[seq]) * token_stride + kv_head * static_cast<u32>(p.kv_head_stride / 8);
  const auto offset_of = [&](int tile_begin) -> u32 {
    const int key = tile_begin + lane.index;
    if (key >= last_key) return ~0u;
    if (!paged) return first + key * token_stride;
    const int number = divide(key, p.page);
    return first + p.block_table[pages + number] * block_stride + (key - number * p.page.divisor) * token_stride;
  };
  const int own_chunk = lane.index % kPitch, own_row = warp * kRowsOfPass + lane.index / kPitch;
  Eight coming[kPasses];
  const auto load = [&](const void* from, u32 offsets) {
    FA_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const u32 at = __shfl_sync(~0u, offsets, pass * kRowsOfPass * kWarps + own_row);
      coming[pass] = eight_zeros();
      if (at != ~0u && own_chunk < kChunks)
        coming[pass] = static_cast<const Eight*>(from)[static_cast<size_t>(at) + own_chunk];
    }
  };
  const auto store = [&](uint4* tile) {
    FA_UNROLL
    for (int pass = 0; pass < kPasses; ++pass)
      tile[swizzled_chunk<kPitch>(pass * kRowsOfPass * kWarps + own_row, own_chunk)] = to_halves(coming[pass]);
  };

  u32 here = offset_of(first_key), next = offset_of(first_key + kTile);  // looked up while queries are loaded
  for (int i = lane.index; i < kWarpRows * kPitch; i += 32) {
    const int row = first_row + i / kPitch, chunk = i % kPitch;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row < num_rows && chunk < kChunks) {
      const int token = divide(row, p.group), head = kv_head * group + row - token * group;
      x = reinterpret_cast<const uint4*>(static_cast<const Half*>(p.query) +
                                         (first_token + token) * p.query_token_stride +
                                         head * p.query_head_stride)[chunk];
    }
    queries[swizzled_chunk<kPitch>(i / kPitch, chunk)] = x;
  }
  load(p.key, here);

  const bool has_rows = first_row < num_rows;
  float output[kOutputs][kElements], reference[2] = {-infinity(), -infinity()}, sum[2] = {0.0f, 0.0f};
  FA_UNROLL
  for (int t = 0; t < kOutputs; ++t) {
    FA_UNROLL
    for (int e = 0; e < kElements; ++e) output[t][e] = 0.0f;
  }
#pragma unroll 1
  for (int begin = first_key; begin < last_key; begin += kTile) {
    store(keys);
    load(p.value, here);
    __syncthreads();
    u32 packed[4];
    if (has_rows) {
      float scores[8];
      FA_UNROLL
      for (int e = 0; e < 8; ++e) scores[e] = 0.0f;
      lane.multiply_by_keys(scores, queries, keys);
      float weights[2][4];
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + lane.row(r), position = divide(row, p.group) + offset;
        const int from = begin_of(position), to = end_of(position);
        float slope = 0.0f;
        if (p.alibi_slopes != nullptr && row < num_rows) {
          slope = p.alibi_slopes[kv_head * group + row - divide(row, p.group) * group] * kLog2E;
        }
        float adjusted[4], most = reference[r];
        FA_UNROLL
        for (int e = 0; e < 4; ++e) {
          const int key = begin + lane.key(e);
          float score = scores[WarpLane::score(r, e)];
          score = p.softcap > 0.0f ? p.softcap * tanh(score * p.scale_over_softcap) : score * p.scale;
          score -= slope * fabsf(static_cast<float>(key - position));
          adjusted[e] = key < from || key >= to ? -infinity() : score;
          most = fmaxf(most, adjusted[e]);
        }
        most = lane.max_of_row(most);
        const float shift = most == -infinity() ? 0.0f : most, rescale = exp2(reference[r] - shift);
        reference[r] = most;
        FA_UNROLL
        for (int t = 0; t < kOutputs; ++t) {
          FA_UNROLL
          for (int e = 0; e < kElements; ++e) {
            if (WarpLane::row_of(e) == r) output[t][e] *= rescale;
          }
        }
        FA_UNROLL
        for (int e = 0; e < 4; ++e) weights[r][e] = exp2(adjusted[e] - shift);
        sum[r] = sum[r] * rescale + (weights[r][0] + weights[r][1]) + (weights[r][2] + weights[r][3]);
      }
      lane.to_operand(packed, weights);
    }
    store(values);
    load(p.key, next);
    __syncthreads();
    if (has_rows) lane.multiply_by_values(output, packed, values);
    here = next;
    next = offset_of(begin + 2 * kTile);  // wanted after the next keys' softmax
  }
  if (!has_rows) return;

  // The means pass through shared memory, in place of the warp's queries, so that whole sectors are written.
  float inverse[2];
  FA_UNROLL
  for (int r = 0; r < 2; ++r) {
    sum[r] = lane.sum_of_row(sum[r]);
    inverse[r] = sum[r] == 0.0f ? 0.0f : __fdividef(1.0f, sum[r]);  // a NaN stays one, as in prefill.cu
  }
  Half* const means = reinterpret_cast<Half*>(queries);
  __syncwarp();
  FA_UNROLL
  for (int t = 0; t < kOutputs; ++t) {
    FA_UNROLL
    for (int e = 0; e < kElements; ++e) {
      const int r = WarpLane::row_of(e), column = lane.column(t, e);
      means[8 * swizzled_chunk<kPitch>(lane.row(r), column / 8) + column % 8] = to_half(output[t][e] * inverse[r]);
    }
  }
  const size_t first_of_part = ((static_cast<size_t>(seq) * gridDim.x + kv_head) * s.parts.divisor + part) * s.rows;
  if (lane.is_first_of_row()) {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + lane.row(r);
      if (row < num_rows)
        s.partial_lse[first_of_part + row] = sum[r] == 0.0f ? -infinity() : reference[r] + __log2f(sum[r]);
    }
  }
  __syncwarp();
  uint4* const to = reinterpret_cast<uint4*>(s.partial_out) + (first_of_part + first_row) * kChunks;
  for (int i = lane.index; i < kWarpRows * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (first_row + row < num_rows) to[i] = queries[swizzled_chunk<kPitch>(row, chunk)];
  }
}

}  // namespace fastattention
