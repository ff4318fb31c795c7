// Attention of up to eight packed rows (a token's query heads of one KV head, and a few tokens): bound by reading keys
// and values once. A sequence is cut into parts; blocks of threads each take one, their warps 32 keys at a time.
//
// The four quadpairs of a warp take 8 keys each, with a softmax and an output of their own, so that nothing passes
// between them until the end. Of large heads each takes a quarter of the output's columns instead, and they exchange
// weights: all columns would not fit its registers. What a warp reads goes through shared memory of its own, so warps
// wait for each other only at the end.
#include "cache.cuh"

#ifndef HEAD_SIZE
#define HEAD_SIZE 128
#endif

namespace fastattention {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 8;
constexpr int kTile = 32;                                           // keys
constexpr int kChunks = HEAD_SIZE / 8;                              // of 8 numbers
constexpr int kPitch = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;  // chunks from row to row
constexpr int kRowsOfPass = 32 / kPitch;                            // that a warp loads at once
constexpr int kPasses = kTile / kRowsOfPass;
constexpr int kColumns = (HEAD_SIZE + 15) / 16;  // pairs of products along the head
constexpr bool kDivided = HEAD_SIZE > 128;       // among the quadpairs
constexpr int kOwnColumns = kDivided ? kColumns / 4 : kColumns;
static_assert(!kDivided || kColumns % 4 == 0, "as many columns for each quadpair");

extern "C" __global__ void __launch_bounds__(kThreads, 2) fa_volta_decode(const Split s) {
  extern __shared__ uint4 shared[];
  const Prefill& p = s.problem;
  const int seq = blockIdx.z, kv_head = blockIdx.y, part = blockIdx.x;
  const int kv_len = p.seq_lens[seq], length = part_length(kv_len);
  const int first_token = p.query_start_loc[seq], q_len = p.query_start_loc[seq + 1] - first_token;
  const int group = p.group.divisor, num_rows = q_len * group, offset = kv_len - q_len;
  const auto begin_of = [&](int position) { return p.window_left < 0 ? 0 : max(0, position - p.window_left); };
  const auto end_of = [&](int position) {
    return p.window_right < 0 ? kv_len : max(0, min(kv_len, position + p.window_right + 1));
  };
  const int part_end = min(kv_len, (part + 1) * length);
  const int first_key = max(part * length, begin_of(offset)) / kTile * kTile;
  const int last_key = min(part_end, end_of(offset + q_len - 1));
  if (part * length >= kv_len) return;

  const int warp = threadIdx.x / 32;
  const Lane lane(threadIdx.x & 31);
  const int quadpair = lane.down + 2 * lane.across;
  uint4* const queries = shared;
  uint4* const tile = shared + kRows * kPitch + warp * kTile * kPitch;  // of this warp

  const auto row_of = [&](int row, long long token_stride, long long head_stride) {
    const int token = divide(row, p.group);
    return (first_token + token) * token_stride + (kv_head * group + row - token * group) * head_stride;
  };
  for (int i = threadIdx.x; i < kRows * kPitch; i += kThreads) {
    const int row = i / kPitch, chunk = i % kPitch;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row < num_rows && chunk < kChunks) {
      x = reinterpret_cast<const uint4*>(static_cast<const Half*>(p.query) +
                                         row_of(row, p.query_token_stride, p.query_head_stride))[chunk];
    }
    queries[place<kPitch>(row, chunk)] = x;
  }
  __syncthreads();

  // Each lane knows where one key of the tile lies.
  const int* const pages =
      p.block_table != nullptr ? p.block_table + static_cast<size_t>(seq) * p.block_table_stride : nullptr;
  const u32 block_stride = p.kv_block_stride / 8, token_stride = p.kv_token_stride / 8;
  const int base = pages != nullptr ? 0 : p.kv_start_loc[seq];
  const auto offset_of = [&](int tile_begin) -> u32 {
    const int key = tile_begin + lane.index;
    if (key >= last_key) return ~0u;
    if (pages == nullptr) return static_cast<u32>(base + key) * token_stride;
    const int number = divide(key, p.page);
    return static_cast<u32>(pages[number]) * block_stride +
           static_cast<u32>(key - number * static_cast<int>(p.page.divisor)) * token_stride;
  };
  const Eight* const key_base =
      reinterpret_cast<const Eight*>(static_cast<const Stored*>(p.key) + kv_head * p.kv_head_stride);
  const Eight* const value_base =
      reinterpret_cast<const Eight*>(static_cast<const Stored*>(p.value) + kv_head * p.kv_head_stride);
  const int own_chunk = lane.index % kPitch, own_row = lane.index / kPitch;
  Eight coming[kPasses];
  const auto load = [&](const Eight* from, u32 offsets) {
    FA_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const u32 at = __shfl_sync(~0u, offsets, pass * kRowsOfPass + own_row);
      coming[pass] = eight_zeros();
      if (at != ~0u && own_chunk < kChunks) coming[pass] = from[static_cast<size_t>(at) + own_chunk];
    }
  };
  const auto store = [&] {
    FA_UNROLL
    for (int pass = 0; pass < kPasses; ++pass)
      tile[place<kPitch>(pass * kRowsOfPass + own_row, own_chunk)] = to_halves(coming[pass]);
  };

  float output[kOwnColumns][2][8], reference[2] = {-infinity(), -infinity()}, sum[2] = {0.0f, 0.0f};
  FA_UNROLL
  for (int t = 0; t < kOwnColumns; ++t) {
    FA_UNROLL
    for (int s = 0; s < 2; ++s) {
      FA_UNROLL
      for (int e = 0; e < 8; ++e) output[t][s][e] = 0.0f;
    }
  }
  // The quadpair's keys, 4 from here on and 4 from 16 further on: eight rows of a phase differ modulo 8.
  const int own_keys = 4 * (quadpair & 1) + 8 * (quadpair >> 1);
  int begin = first_key + warp * kTile;
  u32 here = offset_of(begin), next = offset_of(begin + kWarps * kTile);
  load(key_base, here);
#pragma unroll 1
  for (; begin < last_key; begin += kWarps * kTile) {
    store();
    load(value_base, here);
    const u32 after_next = offset_of(begin + 2 * kWarps * kTile);
    __syncwarp();
    float scores[8];
    FA_UNROLL
    for (int e = 0; e < 8; ++e) scores[e] = 0.0f;
    FA_UNROLL
    for (int c = 0; c < kChunks; ++c) {
      const uint4 q = queries[place<kPitch>(lane.slot, c)];
      const uint4 k = tile[place<kPitch>((lane.index & 3) + own_keys + 16 * lane.half, c)];
      multiply_by_columns(scores, q.x, q.y, k.x, k.y);
      multiply_by_columns(scores, q.z, q.w, k.z, k.w);
    }
    u32 weights[4];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = lane.bit0 + 2 * r + 4 * lane.half, position = divide(row, p.group) + offset;
      const int from = begin_of(position), to = min(part_end, end_of(position));
      float slope = 0.0f;
      if (p.alibi_slopes != nullptr && row < num_rows) {
        slope = p.alibi_slopes[kv_head * group + row - divide(row, p.group) * group] * kLog2E;
      }
      float adjusted[4], most = reference[r];
      FA_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int key = begin + 2 * lane.bit1 + (e & 1) + own_keys + 16 * (e >> 1);
        float score = scores[(e & 1) + 2 * r + 4 * (e >> 1)];
        score = p.softcap > 0.0f ? p.softcap * tanh(score * p.into_cap) : score * p.scale;
        score -= slope * fabsf(static_cast<float>(key - position));
        adjusted[e] = key < from || key >= to ? -infinity() : score;
        most = fmaxf(most, adjusted[e]);
      }
      most = fmaxf(most, of_lane_xor(most, 2));
      if (kDivided) {
        most = fmaxf(most, of_lane_xor(most, 4));
        most = fmaxf(most, of_lane_xor(most, 8));
      }
      const float shift = most == -infinity() ? 0.0f : most, rescale = exp2(reference[r] - shift);
      reference[r] = most;
      FA_UNROLL
      for (int t = 0; t < kOwnColumns; ++t) {
        FA_UNROLL
        for (int s = 0; s < 2; ++s) {
          float (&o)[8] = output[t][s];
          o[2 * r] *= rescale, o[2 * r + 1] *= rescale, o[4 + 2 * r] *= rescale, o[5 + 2 * r] *= rescale;
        }
      }
      const float w0 = exp2(adjusted[0] - shift), w1 = exp2(adjusted[1] - shift);
      const float w2 = exp2(adjusted[2] - shift), w3 = exp2(adjusted[3] - shift);
      sum[r] = sum[r] * rescale + (w0 + w1) + (w2 + w3);
      weights[r] = pack(w0, w1);
      weights[2 + r] = pack(w2, w3);
    }
    FA_UNROLL
    for (int g = 0; g < 4; g += 2) {
      const u32 give = lane.bit1 ? weights[g] : weights[g + 1];
      const u32 got = of_lane_xor(give, 2);
      if (lane.bit1) {
        weights[g] = got;
      } else {
        weights[g + 1] = got;
      }
    }
    __syncwarp();
    store();
    load(key_base, next);
    __syncwarp();
    FA_UNROLL
    for (int of = 0; of < (kDivided ? 4 : 1); ++of) {  // the keys of this quadpair, then of the others
      const int their_keys = 4 * ((quadpair ^ of) & 1) + 8 * ((quadpair ^ of) >> 1);
      FA_UNROLL
      for (int k = 0; k < 2; ++k) {
        const u32 w0 = of == 0 ? weights[2 * k] : of_lane_xor(weights[2 * k], 4 * of);
        const u32 w1 = of == 0 ? weights[2 * k + 1] : of_lane_xor(weights[2 * k + 1], 4 * of);
        FA_UNROLL
        for (int t = 0; t < kOwnColumns; ++t) {
          const int column = kDivided ? 4 * t + quadpair : t;
          const uint4 v = tile[place<kPitch>(their_keys + (lane.index & 3) + 16 * k, 2 * column + lane.half)];
          multiply_by_rows(output[t][0], w0, w1, v.x, v.y);
          multiply_by_rows(output[t][1], w0, w1, v.z, v.w);
        }
      }
    }
    __syncwarp();
    here = next;
    next = after_next;
  }

  // The quadpairs' sums meet in the first, the warps' in shared memory, each row with its reference and its sum.
  constexpr int kWidth = 16 * kColumns + 2;
  float* const of_warps = reinterpret_cast<float*>(shared);  // [kWarps][kRows][kWidth]
  float most[2], factor[2];
  FA_UNROLL
  for (int r = 0; r < 2; ++r) {
    most[r] = fmaxf(reference[r], of_lane_xor(reference[r], 4));
    most[r] = fmaxf(most[r], of_lane_xor(most[r], 8));
    factor[r] = kDivided ? 1.0f : reference[r] == -infinity() ? 0.0f : exp2(reference[r] - most[r]);
    sum[r] *= factor[r];
    FA_UNROLL
    for (int mask = 2; mask < 16; mask *= 2) sum[r] += of_lane_xor(sum[r], mask);
  }
  __syncthreads();
  FA_UNROLL
  for (int t = 0; t < kOwnColumns; ++t) {
    FA_UNROLL
    for (int s = 0; s < 2; ++s) {
      FA_UNROLL
      for (int e = 0; e < 8; ++e) {
        float x = output[t][s][e] * factor[e >> 1 & 1];
        if (!kDivided) {
          x += of_lane_xor(x, 4);
          x += of_lane_xor(x, 8);
        }
        const int row = lane.bit0 + (e & 2) + 4 * lane.half;
        const int column = 8 * (2 * (kDivided ? 4 * t + quadpair : t) + (e >> 2)) + 4 * s + 2 * lane.bit1 + (e & 1);
        if (kDivided || quadpair == 0) of_warps[(warp * kRows + row) * kWidth + column] = x;
      }
    }
  }
  if (quadpair == 0 && lane.bit1 == 0) {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      float* const end_of_row = of_warps + (warp * kRows + lane.bit0 + 2 * r + 4 * lane.half + 1) * kWidth - 2;
      end_of_row[0] = most[r];
      end_of_row[1] = sum[r];
    }
  }
  __syncthreads();
  const size_t first = ((static_cast<size_t>(seq) * gridDim.y + kv_head) * s.parts.divisor + part) * s.rows;
  for (int i = threadIdx.x; i < kRows * HEAD_SIZE; i += kThreads) {
    const int row = i / HEAD_SIZE, column = i % HEAD_SIZE;
    if (row >= num_rows) continue;
    float top = -infinity(), total = 0.0f, x = 0.0f;
    FA_UNROLL
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, of_warps[(w * kRows + row + 1) * kWidth - 2]);
    FA_UNROLL
    for (int w = 0; w < kWarps; ++w) {
      const float* const of_row = of_warps + (w * kRows + row) * kWidth;
      const float share = of_row[kWidth - 2] == -infinity() ? 0.0f : exp2(of_row[kWidth - 2] - top);
      total += share * of_row[kWidth - 1];
      x += share * of_row[column];
    }
    s.partial_out[(first + row) * HEAD_SIZE + column] = total > 0.0f ? x * p.value_scale / total : 0.0f;
    if (column == 0) s.partial_lse[first + row] = total > 0.0f ? top + __log2f(total) : -infinity();
  }
}

}  // namespace fastattention
