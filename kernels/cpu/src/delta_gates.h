// The decay and the rate of each token and value head, and the normalised queries and keys.
namespace fastattention {
namespace {

// The element at index; the library has no scalar conversions on every instruction set.
template <class T>
inline float read_one(const T* p) {
  T lanes[kWidth] = {*p};
  return first_lane(load(lanes));
}

// log2 of e^g, which is never positive.
inline float log2_decay(float a, float a_log, float dt_bias) {
  const float x = a + dt_bias;
  const float softplus = x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x));
  return -__builtin_expf(a_log) * softplus * kLog2E;
}
inline float sigmoid(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }

// log2_decay and the rate of one token.
inline void gates_of_token(const fa_gated_delta& problem, int head, int64_t row, float* log2_of_decay, float* beta) {
  with_dtype(problem.dtype, [&](auto* type) {
    const auto* a = static_cast<decltype(type)>(const_cast<void*>(problem.a));
    const auto* b = static_cast<decltype(type)>(const_cast<void*>(problem.b));
    *log2_of_decay =
        log2_decay(read_one(a + row * problem.a_token_stride + head), problem.a_log[head], problem.dt_bias[head]);
    *beta = sigmoid(read_one(b + row * problem.b_token_stride + head));
  });
}

// since, since_low, decay, remain and beta of the n tokens from row on.
inline void gates_of_chunk(const fa_gated_delta& problem, int head, int64_t row, int n, const DeltaScratch& scratch) {
  double sum = 0;  // sums of many decays are large, and their differences are exponents
  for (int t = 0; t < n; ++t) {
    float decay;
    gates_of_token(problem, head, row + t, &decay, scratch.beta + t);
    sum += decay;
    scratch.since[t] = static_cast<float>(sum);
    scratch.since_low[t] = static_cast<float>(sum - scratch.since[t]);
  }
  const float last = scratch.since[n - 1], last_low = scratch.since_low[n - 1];
  for (int t = 0; t < n; t += kWidth) {
    const Vec since = load(scratch.since + t), low = load(scratch.since_low + t);
    store(scratch.decay + t, exp2(since));
    store(scratch.remain + t, exp2(add(sub(splat(last), since), sub(splat(last_low), low))));
  }
}

// Divides each row by its length and multiplies it by scale. Lanes past size are zero.
inline void normalise(float* rows, int stride, int count, int size, float scale) {
  for (int t = 0; t < count; ++t, rows += stride) {
    Vec squares = splat(0.0f);
    for (int d = 0; d < size; d += kWidth) {
      const Vec x = load(rows + d);
      squares = fma(x, x, squares);
    }
    const Vec factor = splat(scale / __builtin_sqrtf(reduce_add(squares) + 1e-6f));
    for (int d = 0; d < size; d += kWidth) store(rows + d, mul(load(rows + d), factor));
  }
}

}  // namespace
}  // namespace fastattention
