// Attention of up to eight packed rows: the query heads of one KV head, for one token or a few. The time goes into
// reading keys and values once. A sequence is split into parts. Each CTA computes one part; each of its warps takes 32
// keys at a time.
//
// Each warp loads its keys into its own region of shared memory, so warps wait for each other only at the end.
// DecodeLane describes the work of the lanes.
#include "cache.cuh"

#ifndef HEAD_SIZE
#define HEAD_SIZE 128
#endif
#ifndef WARPS
#define WARPS 2
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 2
#endif

namespace fastattention {

constexpr int kWarps = WARPS;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 8;
constexpr int kTile = 32;                                                // keys
constexpr int kChunks = HEAD_SIZE / 8;                                   // chunks of 8 numbers
constexpr int kLanesOfRow = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;  // lanes that load a row
constexpr int kPitch = decode_pitch(kChunks);                            // distance between rows, in chunks
constexpr int kRowsOfPass = 32 / kLanesOfRow;                            // rows that a warp loads at once
constexpr int kPasses = kTile / kRowsOfPass;
constexpr int kThreadsOfRow = kThreads / kRows;  // threads that sum a row over the warps
using WarpLane = DecodeLane<HEAD_SIZE, kPitch>;
constexpr int kOutputs = WarpLane::kOutputs, kElements = WarpLane::kElements;

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM) fa_volta_decode(const Split s) {
  extern __shared__ uint4 shared[];
  const AttentionParams& p = s.problem;
  // A sequence may have fewer parts than the grid has room for. CTAs without a part come last in the grid.
  const int seq = blockIdx.y, part = blockIdx.z, kv_head = blockIdx.x;
  const int kv_len = p.seq_lens[seq], length = part_length(kv_len, s.min_parts);
  const int first_token = p.query_start_loc[seq], q_len = p.query_start_loc[seq + 1] - first_token;
  const int group = p.group.divisor, num_rows = q_len * group, offset = kv_len - q_len;
  const auto begin_of = [&](int position) { return p.window_left < 0 ? 0 : max(0, position - p.window_left); };
  // A tile may extend beyond its part, so each row ends at the end of the part at the latest.
  const int part_end = min((part + 1) * length, kv_len);
  const int last_key =
      p.window_right < 0 ? part_end : max(0, min(part_end, offset + q_len + p.window_right));  // the last row's end
  const auto end_of = [&](int position) {
    return p.window_right < 0 ? last_key : min(last_key, position + p.window_right + 1);
  };
  // Tiles begin with the first visible key. Pages before it may belong to another sequence by now, and may hold
  // infinities, which a weight of 0 would turn into NaN.
  const int first_key = max(part * length, begin_of(offset));
  if (part * length >= kv_len) return;

  const int warp = threadIdx.x / 32;
  const WarpLane lane(threadIdx.x & 31);
  uint4* const queries = shared;
  uint4* const tile = shared + kRows * kPitch + warp * kTile * kPitch;  // of this warp

  // Each lane holds the address of one key of the tile.
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
  const int own_chunk = lane.index % kLanesOfRow, own_row = lane.index / kLanesOfRow;
  Eight coming[kPasses];
  const auto load = [&](const void* from, u32 offsets) {
    FA_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const u32 at = __shfl_sync(~0u, offsets, pass * kRowsOfPass + own_row);
      coming[pass] = eight_zeros();
      if (at != ~0u && own_chunk < kChunks)
        coming[pass] = static_cast<const Eight*>(from)[static_cast<size_t>(at) + own_chunk];
    }
  };
  const auto store = [&] {
    FA_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      if (kLanesOfRow == kPitch || own_chunk < kPitch)
        tile[swizzled_chunk<kPitch>(pass * kRowsOfPass + own_row, own_chunk)] = to_halves(coming[pass]);
    }
  };

  int begin = first_key + warp * kTile;
  u32 here = offset_of(begin), next = offset_of(begin + kWarps * kTile);  // looked up while queries are loaded
  for (int i = threadIdx.x; i < kRows * kPitch; i += kThreads) {
    const int row = i / kPitch, chunk = i % kPitch;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row < num_rows && chunk < kChunks) {
      const int token = divide(row, p.group), head = kv_head * group + row - token * group;
      x = reinterpret_cast<const uint4*>(static_cast<const Half*>(p.query) +
                                         (first_token + token) * p.query_token_stride +
                                         head * p.query_head_stride)[chunk];
    }
    queries[swizzled_chunk<kPitch>(row, chunk)] = x;
  }
  load(p.key, here);
  __syncthreads();

  float output[kOutputs][kElements], reference[2] = {-infinity(), -infinity()}, sum[2] = {0.0f, 0.0f};
  FA_UNROLL
  for (int t = 0; t < kOutputs; ++t) {
    FA_UNROLL
    for (int e = 0; e < kElements; ++e) output[t][e] = 0.0f;
  }
#pragma unroll 1
  for (; begin < last_key; begin += kWarps * kTile) {
    store();
    load(p.value, here);
    __syncwarp();
    float scores[8];
    FA_UNROLL
    for (int e = 0; e < 8; ++e) scores[e] = 0.0f;
    lane.multiply_by_keys(scores, queries, tile);
    float weights[2][4];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = lane.row(r), position = divide(row, p.group) + offset;
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
    u32 packed[4];
    lane.to_operand(packed, weights);
    __syncwarp();
    store();
    load(p.key, next);
    __syncwarp();
    lane.multiply_by_values(output, packed, tile);
    __syncwarp();
    here = next;
    next = offset_of(begin + 2 * kWarps * kTile);  // needed after the next keys' softmax
  }

  // The warps exchange their results in shared memory, each in the place of its tile: outputs, then the references and
  // sums of all rows.
  constexpr int kWidth = HEAD_SIZE + 4;
  static_assert(HEAD_SIZE % 16 == 0, "products fill the head");
  static_assert(kRows * (kWidth + 2) <= kTile * kPitch * 4, "a warp's sums fit into its tile");
  const auto sums_of = [&](int of_warp) {
    return reinterpret_cast<float*>(shared + kRows * kPitch + of_warp * kTile * kPitch);
  };
  float* const own = sums_of(warp);
  FA_UNROLL
  for (int r = 0; r < 2; ++r) sum[r] = lane.sum_of_row(sum[r]);
  FA_UNROLL
  for (int t = 0; t < kOutputs; ++t) {
    FA_UNROLL
    for (int e = 0; e < kElements; ++e) {
      if (lane.has_output(t)) own[lane.row(WarpLane::row_of(e)) * kWidth + lane.column(t, e)] = output[t][e];
    }
  }
  if (lane.is_first_of_row()) {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      own[kRows * kWidth + lane.row(r)] = reference[r];
      own[kRows * kWidth + kRows + lane.row(r)] = sum[r];
    }
  }
  __syncthreads();
  // Each thread writes four columns of a row at a time. At least eight threads share a row, so whole sectors are
  // written.
  const int row = threadIdx.x / kThreadsOfRow, first_column = threadIdx.x % kThreadsOfRow * 4;
  if (row >= num_rows) return;
  float top = -infinity(), total = 0.0f, share[kWarps];
  FA_UNROLL
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, sums_of(w)[kRows * kWidth + row]);
  FA_UNROLL
  for (int w = 0; w < kWarps; ++w) {
    const float of_warp = sums_of(w)[kRows * kWidth + row];
    share[w] = of_warp == -infinity() ? 0.0f : exp2(of_warp - top);
    total += share[w] * sums_of(w)[kRows * kWidth + kRows + row];
  }
  const float inverse = total == 0.0f ? 0.0f : __fdividef(1.0f, total);  // a NaN stays one, as in prefill.cu
  const size_t at = ((static_cast<size_t>(seq) * gridDim.x + kv_head) * s.parts.divisor + part) * s.rows + row;
  FA_UNROLL
  for (int column = first_column; column < HEAD_SIZE; column += 4 * kThreadsOfRow) {
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    FA_UNROLL
    for (int w = 0; w < kWarps; ++w) {
      const float4 of_warp = *reinterpret_cast<const float4*>(sums_of(w) + row * kWidth + column);
      x[0] += share[w] * of_warp.x, x[1] += share[w] * of_warp.y;
      x[2] += share[w] * of_warp.z, x[3] += share[w] * of_warp.w;
    }
    *reinterpret_cast<uint2*>(s.partial_out + at * HEAD_SIZE + column) =
        make_uint2(pack(x[0] * inverse, x[1] * inverse), pack(x[2] * inverse, x[3] * inverse));
  }
  if (first_column == 0) s.partial_lse[at] = total == 0.0f ? -infinity() : top + __log2f(total);
}

}  // namespace fastattention
