// The mask and the online softmax of one panel of rows.
namespace fastattention {
namespace {

// Tiling-mask: what a row sees is an interval of KV positions computed from its own position. No mask is ever stored.
struct Visibility {
  int64_t offset;  // KV position of the sequence's first query token
  int64_t kv_len;
  int64_t left;   // tokens visible before the own position, -1: all
  int64_t right;  // after it, -1: all

  int64_t begin(int64_t token) const { return left < 0 || offset + token < left ? 0 : offset + token - left; }
  int64_t end(int64_t token) const {
    return right < 0 || offset + token + right >= kv_len ? kv_len : offset + token + right + 1;
  }
};

inline Visibility visibility(const fa_attention_problem& problem, int seq) {
  const int64_t kv_len = problem.seq_lens[seq];
  const int64_t q_len = problem.query_start_loc[seq + 1] - problem.query_start_loc[seq];
  return {kv_len - q_len, kv_len, problem.window_left, problem.causal ? 0 : problem.window_right};
}

// scores[0 .. end) of one row to unnormalised weights; columns outside [visible_begin, visible_end) get weight 0.
// Updates the row's running maximum and sum and returns the factor for what was summed before.
inline float softmax_row(float* scores, int begin, int end, bool boundary, int visible_begin, int visible_end,
                         float& maximum, float& sum) {
  Vec highest = splat(-kInfinity);
  for (int column = begin; column < end; column += kWidth) {
    Vec x = load(scores + column);
    if (boundary) {
      x = keep_range(x, splat(-kInfinity), column, visible_begin, visible_end);
      store(scores + column, x);
    }
    highest = max(highest, x);
  }
  const float tile_maximum = reduce_max(highest);
  const float new_maximum = tile_maximum > maximum ? tile_maximum : maximum;
  const float shift = new_maximum == -kInfinity ? 0.0f : new_maximum;  // a row that saw nothing yet: e^-inf, not e^NaN
  const float rescale = new_maximum == maximum ? 1.0f : exp_nonpositive(maximum - shift);
  Vec total = splat(0.0f);
  for (int column = begin; column < end; column += kWidth) {
    const Vec weight = exp_nonpositive(sub(load(scores + column), splat(shift)));
    store(scores + column, weight);
    total = add(total, weight);
  }
  maximum = new_maximum;
  sum = sum * rescale + reduce_add(total);
  return rescale;
}

// One more key with this score and value zero. Updates maximum and sum as a tile of that key alone would, and returns
// the factor for what was summed before. A sink of -inf changes no bit.
inline float add_sink(float sink, float& maximum, float& sum) {
  const float new_maximum = sink > maximum ? sink : maximum;
  const float shift = new_maximum == -kInfinity ? 0.0f : new_maximum;
  const float rescale = new_maximum == maximum ? 1.0f : exp_nonpositive(maximum - shift);
  maximum = new_maximum;
  sum = sum * rescale + exp_nonpositive(sink - shift);
  return rescale;
}

inline void apply_softcap(float* scores, int begin, int end, float softcap) {
  const Vec cap = splat(softcap);
  for (int column = begin; column < end; column += kWidth) {
    store(scores + column, mul(cap, tanh(div(load(scores + column), cap))));
  }
}

// distance: own position minus the position of column 0.
inline void apply_alibi(float* scores, int begin, int end, float slope, float distance) {
  for (int column = begin; column < end; column += kWidth) {
    const Vec gap = abs(sub(iota(static_cast<float>(column)), splat(distance)));
    store(scores + column, fma(splat(-slope), gap, load(scores + column)));
  }
}

}  // namespace
}  // namespace fastattention
