// The mask and the online softmax of one panel of rows. Scores, maxima and sinks are in base 2: a score of s stands for
// the weight 2^s, which saves the exponential a multiplication.
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

// What a row's weights are relative to may lie this far below its highest score (FlashAttention-4's lazy rescaling):
// weights up to 2^8 cost no precision, and after a row's first tiles its sums are hardly ever rescaled.
constexpr float kRescaleAbove = 8.0f;

inline void store_weights(float* p, Vec first, Vec second) {
  store(p, first);
  store(p + kWidth, second);
}
static_assert(kColumnStep % (2 * kWidth) == 0, "weights are made two vectors at a time");

// Scores outside [visible_begin, visible_end) become -inf, whatever they are: weight 0.
inline void keep_visible(float* scores, int begin, int end, int visible_begin, int visible_end) {
  const auto mask = [&](int from, int to) {
    for (int column = from; column < to; column += kWidth) {
      store(scores + column, keep_range(load(scores + column), splat(-kInfinity), column, visible_begin, visible_end));
    }
  };
  // What lies between is visible whole.
  const int left = round_up(visible_begin, kWidth);
  const int right = visible_end / kWidth * kWidth;
  mask(begin, left < end ? left : end);
  mask(right > left ? right : left, end);
}

// scores[begin .. end) of one row, times factor, to unnormalised weights. reference is what the row's weights are
// relative to, sums the lane-wise sum of its weights; both are updated. Returns the factor for what was summed before.
template <class Weight>
inline float softmax_row(const float* scores, int begin, int end, float factor, Weight* weights, float& reference,
                         float* sums) {
  // The weights' precision, not fp32's, is what the exponential has to meet.
  constexpr int kDegree = kFullWeights<Weight> ? 5 : 3;
  Vec highest = splat(-kInfinity), next = highest;
  for (int column = begin; column < end; column += 2 * kWidth) {
    highest = max(highest, load(scores + column));
    next = max(next, load(scores + column + kWidth));
  }
  highest = mul(max(highest, next), splat(factor));
  float rescale = 1.0f;
  if (any_greater(highest, splat(reference + kRescaleAbove))) {
    const float before = reference;
    reference = reduce_max(highest);
    if (before != -kInfinity) rescale = exp2(before - reference);  // else there is nothing to rescale
  }
  const Vec shift = splat(reference == -kInfinity ? 0.0f : -reference);  // saw nothing yet: 2^-inf, not 2^NaN
  const auto weight = [&](int column) { return exp2<kDegree>(fma(load(scores + column), splat(factor), shift)); };
  Vec even = splat(0.0f), odd = splat(0.0f);
  for (int column = begin; column < end; column += 2 * kWidth) {
    const Vec first = weight(column), second = weight(column + kWidth);
    store_weights(weights + column, first, second);
    even = add(even, first);
    odd = add(odd, second);
  }
  store(sums, fma(load(sums), splat(rescale), add(even, odd)));
  return rescale;
}

// One more key with this score and value zero. Updates reference and sum, and returns the factor for what was summed
// before. A sink of -inf changes no bit.
inline float add_sink(float sink, float& reference, float& sum) {
  const float new_reference = sink > reference ? sink : reference;
  const float shift = new_reference == -kInfinity ? 0.0f : new_reference;
  const float rescale = new_reference == reference ? 1.0f : exp2(reference - shift);
  reference = new_reference;
  sum = sum * rescale + exp2(sink - shift);
  return rescale;
}

// softcap in base 2, like the scores.
inline void apply_softcap(float* scores, int begin, int end, float softcap) {
  const Vec cap = splat(softcap);
  for (int column = begin; column < end; column += kWidth) {
    store(scores + column, mul(cap, tanh(div(load(scores + column), cap))));
  }
}

// slope in base 2; distance: own position minus the position of column 0.
inline void apply_alibi(float* scores, int begin, int end, float slope, float distance) {
  for (int column = begin; column < end; column += kWidth) {
    const Vec gap = abs(sub(iota(static_cast<float>(column)), splat(distance)));
    store(scores + column, fma(splat(-slope), gap, load(scores + column)));
  }
}

inline void multiply_scores(float* scores, int begin, int end, float factor) {
  for (int column = begin; column < end; column += kWidth) {
    store(scores + column, mul(load(scores + column), splat(factor)));
  }
}

}  // namespace
}  // namespace fastattention
