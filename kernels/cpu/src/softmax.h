// The mask and the online softmax of one panel of rows. Scores, maxima and sinks are in base 2: a score of s stands for
// the weight 2^s, which saves a multiplication in the exponential.
namespace fastattention {
namespace {

// Tiling-mask: a row sees an interval of KV positions, which is computed from its own position. No mask is stored.
struct Visibility {
  int64_t offset;  // KV position of the sequence's first query token
  int64_t kv_len;
  int64_t left;   // visible tokens before the row's own position, -1: all
  int64_t right;  // visible tokens after it, -1: all

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

// A row's highest score may exceed the row's reference by this much (FlashAttention-4's lazy rescaling). Weights up to
// 2^8 lose no precision, and after its first tiles a row's sums are rarely rescaled.
constexpr float kRescaleAbove = 8.0f;

inline void store_weights(float* p, Vec first, Vec second) {
  store(p, first);
  store(p + kWidth, second);
}
static_assert(kColumnStep % (2 * kWidth) == 0, "weights are computed two vectors at a time");

// Sets scores outside [visible_begin, visible_end) to -inf, whatever they are, so that their weight is 0.
inline void keep_visible(float* scores, int begin, int end, int visible_begin, int visible_end) {
  const auto mask = [&](int from, int to) {
    for (int column = from; column < to; column += kWidth) {
      store(scores + column, keep_range(load(scores + column), splat(-kInfinity), column, visible_begin, visible_end));
    }
  };
  // All columns between left and right are visible.
  const int left = round_up(visible_begin, kWidth);
  const int right = visible_end / kWidth * kWidth;
  mask(begin, left < end ? left : end);
  mask(right > left ? right : left, end);
}

// Turns scores[begin .. end) of one row, times factor, into unnormalised weights. reference is the score that the row's
// weights are relative to, and sums holds the sum of its weights per lane. Updates both, and returns the factor for
// everything that was summed before.
template <class Weight, class Factors>
inline float softmax_row(const float* scores, int begin, int end, float factor, const Factors& row_factors,
                         Weight* weights, float& reference, float* sums) {
  // The exponential only needs the precision of the weights.
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
    if (before != -kInfinity) rescale = exp2(before - reference);  // otherwise there is nothing to rescale
  }
  // A row that has seen nothing yet gets 2^-inf, not 2^NaN.
  const Vec shift = splat(reference == -kInfinity ? 0.0f : -reference);
  const auto weight = [&](int column) { return exp2<kDegree>(fma(load(scores + column), splat(factor), shift)); };
  Vec even = splat(0.0f), odd = splat(0.0f);
  for (int column = begin; column < end; column += 2 * kWidth) {
    const Vec first = weight(column), second = weight(column + kWidth);
    store_weights(weights + column, row_factors.weighted(first, column), row_factors.weighted(second, column + kWidth));
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

// softcap is in base 2, like the scores.
inline void apply_softcap(float* scores, int begin, int end, float softcap) {
  const Vec cap = splat(softcap);
  for (int column = begin; column < end; column += kWidth) {
    store(scores + column, mul(cap, tanh(div(load(scores + column), cap))));
  }
}

// slope is in base 2. distance: the row's own position minus the position of column 0.
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
