// Merges the parts of each sequence into its output, in the order of the parts. There is one CTA for each row, KV head
// and sequence, and one thread for eight numbers of a head. Sinks and the scale of values belong to a row, not to a
// part, so they are applied here.
#include "device.cuh"

namespace fastattention {

extern "C" __global__ void fa_volta_combine(const Split s) {
  const AttentionParams& p = s.problem;
  const int row = blockIdx.x, kv_head = blockIdx.y, seq = blockIdx.z;
  const int first_token = p.query_start_loc[seq], q_len = p.query_start_loc[seq + 1] - first_token;
  const int group = p.group.divisor, kv_len = p.seq_lens[seq];
  if (row >= q_len * group) return;
  const int token = divide(row, p.group), head = kv_head * group + row - token * group;
  int parts = s.parts.divisor;
  if (s.min_parts > 0) {
    const int length = part_length(kv_len, s.min_parts);
    parts = (kv_len + length - 1) / length;
  }
  const size_t first = (static_cast<size_t>(seq) * gridDim.y + kv_head) * s.parts.divisor * s.rows + row;
  const uint4* const means = reinterpret_cast<const uint4*>(s.partial_out) + threadIdx.x;
  float top = -infinity(), total = 0.0f, x[8];
  FA_UNROLL
  for (int e = 0; e < 8; ++e) x[e] = 0.0f;
  constexpr int kAtOnce = 16;  // parts that are loaded at the same time
#pragma unroll 1
  for (int begin = 0; begin < parts; begin += kAtOnce) {
    uint4 mean[kAtOnce];
    float lse[kAtOnce], larger = top;
    FA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      mean[i] = make_uint4(0, 0, 0, 0);
      lse[i] = -infinity();
      if (begin + i < parts) {
        const size_t at = first + (begin + i) * s.rows;
        mean[i] = means[at * blockDim.x];
        lse[i] = s.partial_lse[at];
      }
      larger = fmaxf(larger, lse[i]);
    }
    const float rescale = top == -infinity() ? 0.0f : exp2(top - larger);
    top = larger;
    total *= rescale;
    FA_UNROLL
    for (int e = 0; e < 8; ++e) x[e] *= rescale;
    FA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const float share = lse[i] == -infinity() ? 0.0f : exp2(lse[i] - top);
      const u32 pairs[4] = {mean[i].x, mean[i].y, mean[i].z, mean[i].w};
      total += share;
      FA_UNROLL
      for (int e = 0; e < 8; ++e) x[e] += share * to_float(static_cast<Half>(pairs[e / 2] >> 16 * (e & 1)));
    }
  }
  // A part of NaN has made the total NaN, and that stays.
  float log_of_sum = total == 0.0f ? -infinity() : (top + __log2f(total)) * kLn2,
        share = total == 0.0f ? 0.0f : p.value_scale / total;
  // A sink of -inf adds nothing. It must not be subtracted from the -inf of a row that sees no key.
  const float sink = p.sinks == nullptr ? -infinity() : p.sinks[head];
  if (sink != -infinity()) {
    const float larger = fmaxf(log_of_sum, sink);
    const float with_sink = larger + __logf(__expf(log_of_sum - larger) + __expf(sink - larger));
    share *= __expf(log_of_sum - with_sink);
    log_of_sum = with_sink;
  }
  const uint4 out = make_uint4(pack(x[0] * share, x[1] * share), pack(x[2] * share, x[3] * share),
                               pack(x[4] * share, x[5] * share), pack(x[6] * share, x[7] * share));
  Half* const to = static_cast<Half*>(p.out) + (first_token + token) * p.out_token_stride + head * p.out_head_stride;
  reinterpret_cast<uint4*>(to)[threadIdx.x] = out;
  if (p.lse != nullptr && threadIdx.x == 0) {
    p.lse[(first_token + token) * p.lse_token_stride + head * p.lse_head_stride] = log_of_sum;
  }
}

}  // namespace fastattention
