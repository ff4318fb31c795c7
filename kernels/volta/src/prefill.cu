// Attention of many query rows, with the two-level tiling and the tiling-mask of FastAttention (arXiv 2410.16663), on
// Volta and Turing.
//
// First level: a thread block takes packed rows (a token's query heads of one KV head side by side) of one sequence. It
// passes over the keys and values in tiles that are stored in shared memory.
// Second level: each warp takes 32 rows (16 for large heads). On Volta, scores and output are m8n8k4 products of four
// quadpairs, arranged 2 x 2 over 16 keys (or 16 columns) and 16 rows. Between the two products the weights pass from
// the layout of a result to that of an operand through registers alone, without shared memory.
// Tiling-mask: each row sees an interval of keys. Tiles that all rows see need no mask. Those at the mask's edges run
// first.
#include "cache.cuh"
#include "pair.cuh"

#ifndef HEAD_SIZE
#define HEAD_SIZE 64
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef TILE
#define TILE 64
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 2
#endif
#ifndef ADJUSTED  // 1: scores get a soft cap or ALiBi's bias
#define ADJUSTED 0
#endif

namespace fastattention {

constexpr int kWarps = WARPS;
constexpr int kThreads = 32 * kWarps;
// Blocks of 16 rows per warp. For large heads, the output needs the registers of the second block.
constexpr int kBlocks = HEAD_SIZE <= 128 ? 2 : 1;
// Two warps share their rows, and each multiplies all of them by half of the columns: see pair.cuh.
constexpr bool kPaired = PAIRED;
constexpr int kSharers = kPaired ? 2 : 1;
constexpr int kProducts = kBlocks * kSharers;  // blocks of 16 rows that a warp multiplies, its own ones first
constexpr int kWarpRows = 16 * kBlocks;
constexpr int kRows = kWarpRows * kWarps;
constexpr int kTile = TILE;                                         // keys in a tile
constexpr int kChunks = HEAD_SIZE / 8;                              // chunks of 8 numbers in a row
constexpr int kPitch = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;  // distance between rows in chunks
constexpr int kPasses = kTile * kPitch / kThreads;                  // chunks of a tile per thread
constexpr int kRowsOfPass = 32 / kPitch;                            // rows that a warp copies per pass
constexpr int kKeyColumns = kTile / 16;                             // blocks of 16 keys in a tile
constexpr int kOutputs = output_blocks(HEAD_SIZE) / kSharers;       // blocks of 16 columns that a warp multiplies
static_assert(kPasses * kRowsOfPass <= 32, "each lane knows where one row of a tile lies");

constexpr bool kAdjusted = ADJUSTED;

// Finds the rows of a tile that this warp loads. Each lane knows the address of one of them.
struct RowFinder {
  const int* tables;  // block table of all sequences; null: the cache has no pages
  u32 table, begin;   // start of the sequence's block table; start of this head's keys, in chunks
  Divisor page;
  u32 block_stride, token_stride;  // in chunks
  int first, last;                 // the lane's row in a tile; the sequence's last key

  struct Row {
    int entry, token;
  };
  // Positions after the last key get the last key again, which masks hide. The memory after it may hold NaN.
  FA_DEVICE Row look_up(int tile_begin) const {
    const int key = min(tile_begin + first, last);
    if (tables == nullptr) return {0, key};
    const int number = divide(key, page);
    return {tables[table + number], key - number * static_cast<int>(page.divisor)};
  }
  FA_DEVICE u32 offset(Row row) const { return begin + row.entry * block_stride + row.token * token_stride; }
};

struct Masked {
  static constexpr bool value = true;
};
struct Unmasked {
  static constexpr bool value = false;
};

struct Loader {
  int chunk, row;  // this thread's place in the first pass
  bool in_head;

  FA_DEVICE void load(Eight (&to)[kPasses], const Eight* base, u32 offsets) const {
    FA_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const u32 offset = __shfl_sync(~0u, offsets, pass * kRowsOfPass + (threadIdx.x & 31) / kPitch);
      if (kChunks < kPitch) to[pass] = eight_zeros();
      if (kChunks == kPitch || in_head) to[pass] = base[offset + chunk];
    }
  }
  FA_DEVICE void store(uint4* tile, const Eight (&from)[kPasses]) const {
    FA_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      tile[swizzled_chunk<kPitch>(row + pass * (kThreads / kPitch), chunk)] = to_halves(from[pass]);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM) fa_volta_prefill(const Split s) {
  const AttentionParams& p = s.problem;
  extern __shared__ uint4 shared[];
  uint4* const queries = shared;
  uint4* const keys = queries + kRows * kPitch;
  uint4* const values = keys + kTile * kPitch;

  const int seq = blockIdx.z, kv_head = divide(blockIdx.x, s.parts);
  const int first_token_of_all = p.query_start_loc[seq];
  const int q_len = p.query_start_loc[seq + 1] - first_token_of_all, kv_len = p.seq_lens[seq];
  const int group = p.group.divisor, num_rows = q_len * group;
  // The rows that see the most keys start first in every head, so that short ones are left at the end.
  const int first_row = (gridDim.y - 1 - blockIdx.y) * kRows;
  if (first_row >= num_rows) return;

  const int warp = threadIdx.x / 32;
  const Lane lane(threadIdx.x & 31);

  // The tiles that some rows see, and the tiles that all rows see.
  const int offset = kv_len - q_len;
  const int first_position = divide(first_row, p.group) + offset;
  const int last_position = divide(min(first_row + kRows, num_rows) - 1, p.group) + offset;
  const auto begin_of = [&](int position) { return p.window_left < 0 ? 0 : max(0, position - p.window_left); };
  const auto end_of = [&](int position) {
    return p.window_right < 0 ? kv_len : max(0, min(kv_len, position + p.window_right + 1));
  };
  // Tiles are counted from the first key that some row sees. Pages before it may belong to another sequence by now.
  // They may hold anything, and a weight of 0 does not hide an infinity.
  const int origin = begin_of(first_position);
  int some_begin = 0, some_end = (max(0, end_of(last_position) - origin) + kTile - 1) / kTile;
  if (s.parts.divisor > 1) {  // each part gets the same number of tiles
    const int part = blockIdx.x - kv_head * s.parts.divisor, tiles = some_end;
    some_end = divide(tiles * (part + 1), s.parts);
    some_begin += divide(tiles * part, s.parts);
  }
  const int all_begin = min(some_end, max(some_begin, (begin_of(last_position) - origin + kTile - 1) / kTile));
  const int all_end = max(all_begin, min(some_end, (end_of(first_position) - origin) / kTile));
  const int behind = some_end - all_end, masked = behind + all_begin - some_begin;
  const int num_tiles = some_end - some_begin;
  // The order of tiles: masked ones after the tiles that all rows see, masked ones before them, then those that all
  // rows see.
  const int end_key = origin + some_end * kTile, key_before = origin + (some_begin - behind) * kTile;
  const auto tile_begin = [&](int number) {
    return number < behind ? end_key - (1 + number) * kTile : key_before + number * kTile;
  };

  const Loader loader{static_cast<int>(threadIdx.x % kPitch), static_cast<int>(threadIdx.x / kPitch),
                      static_cast<int>(threadIdx.x % kPitch) < kChunks};
  const int my_row = (lane.index / kRowsOfPass) * (kThreads / kPitch) + warp * kRowsOfPass + lane.index % kRowsOfPass;
  const u32 token_stride = p.kv_token_stride / 8, head_stride = p.kv_head_stride / 8;
  const u32 first_key = p.block_table != nullptr ? 0 : p.kv_start_loc[seq];
  const RowFinder finder{p.block_table,
                         static_cast<u32>(seq) * p.block_table_stride,
                         first_key * token_stride + kv_head * head_stride,
                         p.page,
                         static_cast<u32>(p.kv_block_stride / 8),
                         token_stride,
                         my_row,
                         kv_len - 1};
  const Eight* const keys_in_memory = static_cast<const Eight*>(p.key);
  const Eight* const values_in_memory = static_cast<const Eight*>(p.value);

  const auto row_of = [&](int row, long long token_stride, long long head_stride) {
    const int token = divide(row, p.group);
    return (first_token_of_all + token) * token_stride + (kv_head * group + row - token * group) * head_stride;
  };
  // For queries and output too, each lane knows the address of one of its warp's rows, in chunks. Rows after the last
  // one get the address of the last one.
  const int known_row = min(first_row + kWarpRows * warp + lane.index % kWarpRows, num_rows - 1);
  const int row_of_lane = lane.index / kPitch, chunk_of_lane = lane.index % kPitch;  // its place in each pass

  Eight coming[kPasses];
  u32 here = 0, next = 0;  // offsets of this tile's rows and of the next tile's
  if (num_tiles > 0) {
    here = finder.offset(finder.look_up(tile_begin(0)));
    next = finder.offset(finder.look_up(tile_begin(1)));
    loader.load(coming, keys_in_memory, here);
  }
  const u32 query_row = static_cast<u32>(row_of(known_row, p.query_token_stride / 8, p.query_head_stride / 8));
  FA_UNROLL
  for (int i = 0; i < kWarpRows; i += kRowsOfPass) {
    const u32 from = __shfl_sync(~0u, query_row, i + row_of_lane);
    uint4 x = make_uint4(0, 0, 0, 0);
    if (kChunks == kPitch || chunk_of_lane < kChunks)
      x = static_cast<const uint4*>(p.query)[static_cast<size_t>(from) + chunk_of_lane];
    queries[swizzled_chunk<kPitch>(kWarpRows * warp + i + row_of_lane, chunk_of_lane)] = x;
  }
  if (num_tiles > 0) {
    loader.store(keys, coming);
  }
  __syncthreads();

  float output[kProducts][kOutputs][8], reference[kBlocks][2], sum[kBlocks][2];
  FA_UNROLL
  for (int i = 0; i < kBlocks; ++i) {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) reference[i][r] = -infinity(), sum[i][r] = 0.0f;
  }
  FA_UNROLL
  for (int i = 0; i < kProducts; ++i) {
    FA_UNROLL
    for (int t = 0; t < kOutputs; ++t) {
      FA_UNROLL
      for (int e = 0; e < 8; ++e) output[i][t][e] = 0.0f;
    }
  }
  // The row of the lane's first element of a result, in the first block of 16 rows.
  const int result_row = kWarpRows * warp + lane.row();

  // The number of masked tiles at the start of the order, beginning with the sequence's last tile, that no row of this
  // warp, and of those that share its rows, sees.
  const int behind_warp = first_row + kSharers * kWarpRows * (warp / kSharers + 1);
  const int warp_position = divide(min(behind_warp, num_rows) - 1, p.group) + offset;
  const int unseen = min(behind, (end_key - end_of(warp_position)) / kTile);

  const Pair<kPitch, kWarps> pair(values, warp, lane.index);
  const float factor = kAdjusted ? 1.0f : p.scale;  // applied to scores in the exponent
  const auto rescale_output = [&](int i, int r, float by) {
    FA_UNROLL
    for (int t = 0; t < kOutputs; ++t) {
      float (&o)[8] = output[i][t];
      o[2 * r] *= by, o[2 * r + 1] *= by, o[4 + 2 * r] *= by, o[5 + 2 * r] *= by;
    }
  };
  const auto step = [&](bool more, int begin, int begin_after_next, auto with_mask) {
    loader.load(coming, values_in_memory, here);
    constexpr bool kMasked = decltype(with_mask)::value;
    const RowFinder::Row after_next = finder.look_up(begin_after_next);
    float scores[kProducts][kKeyColumns][8];
    FA_UNROLL
    for (int i = 0; i < kProducts; ++i) {
      FA_UNROLL
      for (int j = 0; j < kKeyColumns; ++j) {
        FA_UNROLL
        for (int e = 0; e < 8; ++e) scores[i][j][e] = 0.0f;
      }
    }
    FA_UNROLL
    for (int c = 0; c < kChunks / kSharers; ++c) {
      __syncwarp();  // without it the compiler issues loads in bursts that exceed the memory queue
      Operand q[kProducts];
      if constexpr (kPaired) {
        pair.load_queries(q, queries, lane, c);
      } else {
        load_queries<kPitch>(q, queries, lane, kWarpRows * warp, c);
      }
      FA_UNROLL
      for (int j = 0; j < kKeyColumns; j += kKeysAtOnce) {
        Operand k[kKeysAtOnce];
        if constexpr (kPaired) {
          pair.load_keys(k, keys, lane, 16 * j, c);
        } else {
          load_keys<kPitch>(k, keys, lane, 16 * j, c);
        }
        FA_UNROLL
        for (int also = 0; also < kKeysAtOnce; ++also) multiply_by_keys(scores, j + also, q, k[also]);
      }
    }
    if constexpr (kPaired) {
      pair.complete(scores);
    } else {
      loader.store(values, coming);
      if (more) loader.load(coming, keys_in_memory, next);
    }

    if constexpr (kAdjusted) {
      // One division for all scores. The result is not used without a soft cap.
      const float scale_over_softcap = __fdividef(p.scale, p.softcap);
      FA_UNROLL
      for (int i = 0; i < kBlocks; ++i) {
        FA_UNROLL
        for (int j = 0; j < kKeyColumns; ++j) {
          FA_UNROLL
          for (int e = 0; e < 8; ++e) {
            float& score = scores[i][j][e];
            score = p.softcap > 0.0f ? p.softcap * tanh(score * scale_over_softcap) : score * p.scale;
          }
        }
      }
      if (p.alibi_slopes != nullptr) {
        FA_UNROLL
        for (int i = 0; i < kBlocks; ++i) {
          FA_UNROLL
          for (int r = 0; r < 2; ++r) {
            const int row = first_row + result_row + 16 * i + kRowStep * r, token = divide(row, p.group);
            const float slope = p.alibi_slopes[kv_head * group + row - token * group] * kLog2E;
            // Distance from the row's own token to the key of the first column.
            const float distance = static_cast<float>(begin + lane.column() - token - offset);
            FA_UNROLL
            for (int j = 0; j < kKeyColumns; ++j) {
              FA_UNROLL
              for (int e = 0; e < 4; ++e) {
                const float way = distance + static_cast<float>(16 * j + (e & 1) + kColumnStep * (e >> 1));
                scores[i][j][(e & 1) + 4 * (e >> 1) + 2 * r] += slope * fminf(way, -way);
              }
            }
          }
        }
      }
    }
    if constexpr (kMasked) {
      const int first_key = begin + lane.column();
      FA_UNROLL
      for (int i = 0; i < kBlocks; ++i) {
        FA_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int position = divide(first_row + result_row + 16 * i + kRowStep * r, p.group) + offset;
          const int from = begin_of(position) - first_key, to = end_of(position) - first_key;
          FA_UNROLL
          for (int j = 0; j < kKeyColumns; ++j) {
            FA_UNROLL
            for (int e = 0; e < 4; ++e) {
              const int column = 16 * j + (e & 1) + kColumnStep * (e >> 1);
              float& score = scores[i][j][(e & 1) + 4 * (e >> 1) + 2 * r];
              if (column < from || column >= to) score = -infinity();
            }
          }
        }
      }
    }

    u32 weights[kProducts][kKeyColumns][4];
    float factors[kProducts][2];  // for the earlier output
    FA_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        float most = reference[i][r];
        FA_UNROLL
        for (int j = 0; j < kKeyColumns; ++j) {
          const float (&s)[8] = scores[i][j];
          most = fmaxf(most, fmaxf(fmaxf(s[2 * r], s[2 * r + 1]), fmaxf(s[4 + 2 * r], s[5 + 2 * r])));
        }
        most = max_of_row(most);
        const bool rescales = !kPaired || (most - reference[i][r]) * factor > kLag;
        if (!rescales) most = reference[i][r];
        // A row that has seen nothing yet must not subtract infinity from infinity.
        const float shift = kMasked && most == -infinity() ? 0.0f : most * factor;
        const float rescale = rescales ? exp2(reference[i][r] * factor - shift) : 1.0f;
        reference[i][r] = most;
        float total = sum[i][r] * rescale;
        factors[i][r] = rescale;
        if constexpr (!kPaired) rescale_output(i, r, rescale);
        FA_UNROLL
        for (int j = 0; j < kKeyColumns; ++j) {
          const float (&s)[8] = scores[i][j];
          const float w0 = exp2(s[2 * r] * factor - shift), w1 = exp2(s[2 * r + 1] * factor - shift);
          const float w2 = exp2(s[4 + 2 * r] * factor - shift), w3 = exp2(s[5 + 2 * r] * factor - shift);
          total += (w0 + w1) + (w2 + w3);
          weights[i][j][r] = kPaired ? pack_weights(w0, w1) : pack(w0, w1);
          weights[i][j][2 + r] = kPaired ? pack_weights(w2, w3) : pack(w2, w3);
        }
        sum[i][r] = total;
      }
      FA_UNROLL
      for (int j = 0; j < kKeyColumns; ++j) to_operand(weights[i][j], lane);
    }
    if constexpr (kPaired) {
      pair.exchange(weights, factors);
      __syncwarp();  // the values replace what other lanes have just read
      loader.store(values, coming);
      if (factors[0][0] != 1.0f || factors[0][1] != 1.0f || factors[1][0] != 1.0f || factors[1][1] != 1.0f) {
        FA_UNROLL
        for (int i = 0; i < kProducts; ++i) {
          FA_UNROLL
          for (int r = 0; r < 2; ++r) rescale_output(i, r, factors[i][r]);
        }
      }
      if (more) loader.load(coming, keys_in_memory, next);
    }
    __syncthreads();
    FA_UNROLL
    for (int j = 0; j < kKeyColumns; ++j) {
      if constexpr (kPaired) {
        pair.multiply_by_values(output, weights, j, values, lane, 16 * j);
      } else {
        multiply_by_values<kPitch>(output, weights, j, values, lane, 16 * j);
      }
    }
    if (more) loader.store(keys, coming);
    here = next;
    next = finder.offset(after_next);
    __syncthreads();
  };
  int number = 0;
  // A separate loop, before sums are in registers. Inside the step, skipping a tile would spill registers.
#pragma unroll 1
  for (; number < unseen; ++number) {  // the warp only loads its part of the tile
    loader.load(coming, values_in_memory, here);
    loader.store(values, coming);
    const RowFinder::Row after_next = finder.look_up(tile_begin(number + 2));
    loader.load(coming, keys_in_memory, next);
    __syncthreads();
    loader.store(keys, coming);
    here = next;
    next = finder.offset(after_next);
    __syncthreads();
  }
#pragma unroll 1
  for (; number < masked; ++number) step(number + 1 < num_tiles, tile_begin(number), tile_begin(number + 2), Masked());
  int begin_after_next = tile_begin(masked + 2);
#pragma unroll 1
  for (; number < num_tiles; ++number, begin_after_next += kTile) {
    step(number + 1 < num_tiles, begin_after_next - 2 * kTile, begin_after_next, Unmasked());
  }

  // No other warp uses these rows, so the warp's part of the queries' tile stages the output.
  Half* const staged = reinterpret_cast<Half*>(queries);
  float* const shares = reinterpret_cast<float*>(keys);  // used by warps that share rows
  // Two numbers of this warp's output, in a chunk of the head.
  const auto chunk_of = [&](int t, int e) {
    if constexpr (kPaired) return pair.output_chunk(lane, t, e);
    return lane.output_chunk(t, e);
  };
  const auto two_of = [&](int i, int r, int t, int e, float share) {
    return pack(output[i][t][4 * e + 2 * r] * share, output[i][t][4 * e + 2 * r + 1] * share);
  };
  const auto write_part = [&](int i, int r, int row, float share) {
    const size_t at = (static_cast<size_t>(seq) * gridDim.x + blockIdx.x) * s.rows + row;
    Half* const out = s.partial_out + at * HEAD_SIZE;
    FA_UNROLL
    for (int t = 0; t < kOutputs; ++t) {
      FA_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int chunk = chunk_of(t, e);
        if (chunk < kChunks && row < num_rows) {
          *reinterpret_cast<u32*>(out + 8 * chunk + lane.output_column(t)) = two_of(i, r, t, e, share);
        }
      }
    }
  };
  const auto stage = [&](int i, int r, int own_row, float share) {
    FA_UNROLL
    for (int t = 0; t < kOutputs; ++t) {
      FA_UNROLL
      for (int e = 0; e < 2; ++e) {
        *reinterpret_cast<u32*>(staged + swizzled_chunk<kPitch>(own_row, chunk_of(t, e)) * 8 + lane.output_column(t)) =
            two_of(i, r, t, e, share);
      }
    }
  };
  FA_UNROLL
  for (int i = 0; i < kBlocks; ++i) {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      // 0 if the row sees no key, NaN if a score is NaN or +inf: comparisons with 0 alone keep that.
      const float total = sum_of_row(sum[i][r]);
      const int own_row = result_row + 16 * i + kRowStep * r, row = first_row + own_row;
      const bool real = row < num_rows;
      float share = total == 0.0f ? 0.0f : (s.parts.divisor > 1 ? 1.0f : p.value_scale) / total;
      const bool writes_lse = real && lane.is_first_of_row();
      if (s.parts.divisor > 1) {  // other parts have the same rows, and a sink must count once
        const size_t at = (static_cast<size_t>(seq) * gridDim.x + blockIdx.x) * s.rows + row;
        if (writes_lse) s.partial_lse[at] = total == 0.0f ? -infinity() : reference[i][r] * factor + __log2f(total);
        if constexpr (kPaired) {
          if (lane.is_first_of_row()) shares[own_row] = share;
        } else {
          write_part(i, r, row, share);
        }
        continue;
      }
      const float log_of_sum = total == 0.0f ? -infinity() : reference[i][r] * factor * kLn2 + __logf(total);
      float lse = log_of_sum;
      float sink = -infinity();
      if (p.sinks != nullptr && real) sink = p.sinks[kv_head * group + row - divide(row, p.group) * group];
      if (sink != -infinity()) {  // combine.cu does the same
        const float larger = fmaxf(log_of_sum, sink);
        lse = larger + __logf(__expf(log_of_sum - larger) + __expf(sink - larger));
        share *= __expf(log_of_sum - lse);
      }
      if (p.lse != nullptr && writes_lse) p.lse[row_of(row, p.lse_token_stride, p.lse_head_stride)] = lse;
      if constexpr (kPaired) {
        if (lane.is_first_of_row()) shares[own_row] = share;
      } else {
        __syncwarp();
        stage(i, r, own_row, share);
      }
    }
  }
  if constexpr (kPaired) {
    pair.wait();
    FA_UNROLL
    for (int i = 0; i < kProducts; ++i) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int own_row = pair.first_row(i) + lane.row() + kRowStep * r;
        if (s.parts.divisor > 1) {
          write_part(i, r, first_row + own_row, shares[own_row]);
        } else {
          stage(i, r, own_row, shares[own_row]);
        }
      }
    }
    pair.wait();
  }
  if (s.parts.divisor > 1) return;
  __syncwarp();
  const u32 out_row = static_cast<u32>(row_of(known_row, p.out_token_stride / 8, p.out_head_stride / 8));
  FA_UNROLL
  for (int i = 0; i < kWarpRows; i += kRowsOfPass) {
    const int own_row = kWarpRows * warp + i + row_of_lane;
    const u32 to = __shfl_sync(~0u, out_row, i + row_of_lane);
    if (first_row + own_row < num_rows && (kChunks == kPitch || chunk_of_lane < kChunks)) {
      static_cast<uint4*>(p.out)[static_cast<size_t>(to) + chunk_of_lane] =
          queries[swizzled_chunk<kPitch>(own_row, chunk_of_lane)];
    }
  }
}

}  // namespace fastattention
