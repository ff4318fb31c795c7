// Parts of sequences become their output, in their order: a block of threads for each row, KV head and sequence, a
// thread for each number of a head. Sinks belong to a row, not to a part, so they count here.
#include "device.cuh"

namespace fastattention {

extern "C" __global__ void fa_volta_combine(const Split s) {
  const Prefill& p = s.problem;
  const int row = blockIdx.x, kv_head = blockIdx.y, seq = blockIdx.z, column = threadIdx.x, head_size = blockDim.x;
  const int first_token = p.query_start_loc[seq], q_len = p.query_start_loc[seq + 1] - first_token;
  const int group = p.group.divisor, kv_len = p.seq_lens[seq];
  if (row >= q_len * group) return;
  const int token = divide(row, p.group), head = kv_head * group + row - token * group;
  int parts = s.parts.divisor;
  if (s.least_parts > 0) {
    const int length = part_length(kv_len, s.least_parts);
    parts = (kv_len + length - 1) / length;
  }
  const size_t first = (static_cast<size_t>(seq) * gridDim.y + kv_head) * s.parts.divisor * s.rows + row;
  float top = -infinity();
  for (int part = 0; part < parts; ++part) top = fmaxf(top, s.partial_lse[first + part * s.rows]);
  float total = 0.0f, x = 0.0f;
  for (int part = 0; part < parts && top != -infinity(); ++part) {
    const size_t at = first + part * s.rows;
    const float share = exp2(s.partial_lse[at] - top);
    total += share;
    x += share * s.partial_out[at * head_size + column];
  }
  float log_of_sum = total > 0.0f ? (top + __log2f(total)) * kLn2 : -infinity(),
        share = total > 0.0f ? 1.0f / total : 0.0f;
  if (p.sinks != nullptr) {
    const float larger = fmaxf(log_of_sum, p.sinks[head]);
    const float with_sink = larger + __logf(__expf(log_of_sum - larger) + __expf(p.sinks[head] - larger));
    share *= __expf(log_of_sum - with_sink);
    log_of_sum = with_sink;
  }
  static_cast<Half*>(p.out)[(first_token + token) * p.out_token_stride + head * p.out_head_stride + column] =
      to_half(x * share);
  if (p.lse != nullptr && column == 0) {
    p.lse[(first_token + token) * p.lse_token_stride + head * p.lse_head_stride] = log_of_sum;
  }
}

}  // namespace fastattention
