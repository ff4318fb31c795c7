// One token: the state is read from memory once, and written once while it is still in a cache. With draft tokens, it
// is written to another place.
namespace fastattention {
namespace {

struct DeltaToken {
  const float* query;
  const float* key;
  float match;  // key . query
  float decay;
  float beta;
  bool begun;  // false: the state is zero, whatever the memory holds
};

// N vectors of columns of the state, which becomes `after`. ahead: a part of the state that is read next, with the same
// rows.
template <int N, class S, class Part>
inline void update_columns(const DeltaToken& token, int key_size, int64_t row_stride, const S* state, S* after,
                           const S* ahead, const float* value, float* out, Part part) {
  Vec known[N], seen[N];
  FA_UNROLL
  for (int n = 0; n < N; ++n) known[n] = seen[n] = splat(0.0f);
  if (token.begun) {
    for (int i = 0; i < key_size; ++i) {
      const Vec key = splat(token.key[i]), query = splat(token.query[i]);
      FA_UNROLL
      for (int n = 0; n < N; ++n) {
        const Vec row = part.read(state + i * row_stride + n * kWidth);
        known[n] = fma(key, row, known[n]);
        seen[n] = fma(query, row, seen[n]);
      }
    }
  }
  const Vec decay = splat(token.decay);
  Vec change[N];
  FA_UNROLL
  for (int n = 0; n < N; ++n) {
    change[n] = mul(splat(token.beta), sub(part.read(value + n * kWidth), mul(decay, known[n])));
    part.write(out + n * kWidth, fma(splat(token.match), change[n], mul(decay, seen[n])));
  }
  for (int i = 0; i < key_size; ++i) {
    const Vec key = splat(token.key[i]);
    if (ahead != nullptr) {
      for (int n = 0; n < static_cast<int>(N * kWidth * sizeof(S)); n += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(ahead + i * row_stride) + n);
      }
    }
    FA_UNROLL
    for (int n = 0; n < N; ++n) {
      const int64_t row = i * row_stride + n * kWidth;
      const Vec before = token.begun ? mul(decay, part.read(state + row)) : splat(0.0f);
      part.write(after + row, fma(key, change[n], before));
    }
  }
}

// Vectors of columns that pass together: whole rows of 128 columns with 16 lanes, so that memory is read in order. Each
// takes two accumulators.
constexpr int kStateVectors = kWidth == 16 ? 8 : 4;

// The state of one value head, [key_size][value_size], from column on. next: the state that is read next, or null.
template <int N, class S>
void update_state(const DeltaToken& token, int key_size, int value_size, int column, const S* state, S* after,
                  const S* next, const float* value, float* out) {
  constexpr int kColumns = N * kWidth;
  for (; column + kColumns <= value_size; column += kColumns) {
    const S* ahead = column + 2 * kColumns <= value_size ? state + column + kColumns : next;
    update_columns<N>(token, key_size, value_size, state + column, after + column, ahead, value + column, out + column,
                      WholeVector());
  }
  if constexpr (N > 4) {
    update_state<N / 2>(token, key_size, value_size, column, state, after, next, value, out);
  } else {
    for_each_vector(value_size - column, [&](int d, auto part) {
      update_columns<1>(token, key_size, value_size, state + column + d, after + column + d,
                        static_cast<const S*>(nullptr), value + column + d, out + column + d, part);
    });
  }
}

}  // namespace
}  // namespace fastattention
