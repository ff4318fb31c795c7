// Few query rows and a bf16 cache: K and V are read in pairs of vectors (with AVX-512 in whole cache lines), each of
// which becomes two fp32 vectors. The 32-bit lanes hold pairs of neighbours. A shift widens the even one and a mask the
// odd one, whereas widening half as many numbers takes a shuffle and a shift. So every 2 * kWidth dimensions of queries
// and output are stored as the even and then the odd ones.
namespace fastattention {
namespace {

template <class T>
constexpr bool kReadInPairs = false;
template <>
constexpr bool kReadInPairs<BFloat16> = true;

// Tokens of R rows that are computed at the same time, because the next multiply-add of a sum has to wait for its
// previous one.
template <int R>
constexpr int kTokensAbreast = kWidth / R < 4 ? kWidth / R : 4;
constexpr int kPairWidth = 2 * kWidth;

// Not inlined, like pair_values below; panel_direct.h gives the reason.
template <class T, int R>
__attribute__((noinline)) void pair_scores(const float* query, int stride, const T* const* key, Prefetch<T>& upcoming,
                                           int begin, int end, float* scores) {
  constexpr int kTokens = kWidth / R;
  constexpr int kAbreast = kTokensAbreast<R>;
  for (int column = begin; column < end; column += kTokens) {
    Vec sums[kWidth];
    FA_UNROLL
    for (int i = 0; i < kWidth; ++i) sums[i] = splat(0.0f);
    FA_UNROLL
    for (int first = 0; first < kTokens; first += kAbreast) {
      for (int d = 0; d < stride; d += kPairWidth) {
        upcoming.advance();
        Vec even_query[R], odd_query[R];
        FA_UNROLL
        for (int r = 0; r < R; ++r) {
          even_query[r] = load(query + r * stride + d);
          odd_query[r] = load(query + r * stride + d + kWidth);
        }
        FA_UNROLL
        for (int t = first; t < first + kAbreast; ++t) {
          Vec even, odd;
          load_pairs(key[column + t] + d, even, odd);
          FA_UNROLL
          for (int r = 0; r < R; ++r) {
            Vec& sum = sums[r * kTokens + t];
            sum = fma(odd_query[r], odd, fma(even_query[r], even, sum));
          }
        }
      }
    }
    alignas(64) float products[kWidth];
    store(products, reduce_add_each(sums));
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      __builtin_memcpy(scores + r * kKvTile + column, products + r * kTokens, kTokens * sizeof(float));
    }
  }
}

// With more rows, scores take about as long as values, so the next rows are prefetched equally during both.
template <int R>
constexpr int kPairValuesPerStep = R > 4 ? 2 : 1;

// Computes N cache lines of each row at the same time.
template <class T, int R, int N>
__attribute__((noinline)) void pair_values(const float* weights, const T* const* value, Prefetch<T>& upcoming,
                                           int stride, int begin, int end, int d, const float* rescale, float* output) {
  constexpr int kVectors = 2 * N;
  for (; d + N * kPairWidth <= stride; d += N * kPairWidth) {
    Vec c[R][kVectors];
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      FA_UNROLL
      for (int n = 0; n < kVectors; ++n) c[r][n] = splat(0.0f);
    }
    for (int i = begin; i < end; ++i) {
      if (i % kPairValuesPerStep<R> == 0) upcoming.advance();
      Vec operand[kVectors];
      FA_UNROLL
      for (int n = 0; n < kVectors; n += 2) load_pairs(value[i] + d + n * kWidth, operand[n], operand[n + 1]);
      FA_UNROLL
      for (int r = 0; r < R; ++r) {
        const Vec weight = splat(weights[r * kKvTile + i]);
        FA_UNROLL
        for (int n = 0; n < kVectors; ++n) c[r][n] = fma(weight, operand[n], c[r][n]);
      }
    }
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec factor = splat(rescale[r]);
      FA_UNROLL
      for (int n = 0; n < kVectors; ++n) {
        float* to = output + r * stride + d + n * kWidth;
        store(to, fma(load(to), factor, c[r][n]));
      }
    }
  }
  if constexpr (N > 1) {
    if (d < stride) pair_values<T, R, N / 2>(weights, value, upcoming, stride, begin, end, d, rescale, output);
  }
}

template <class T>
struct PairPanels {
  using Element = float;
  using Weight = float;
  static constexpr int kRows = 4;
  static constexpr bool kEven = false;
  const Scratch& scratch;
  int head_size;
  const KvRows<T>* current = nullptr;
  Prefetch<T> upcoming{};

  static bool can_run(const fa_attention_problem& problem) { return problem.head_size % kPairWidth == 0; }
  static int tile_tokens(int) { return kDirectTile; }
  static int query_stride(int head_size) { return head_size; }
  static int output_stride(int head_size) { return head_size; }

  void arrange_queries(int num_rows) {
    float* query = static_cast<float*>(scratch.query);
    for_each_pair(num_rows, query, [](Vec& first, Vec& second) { part_pairs(first, second); });
  }
  void arrange_output(int num_rows) {
    for_each_pair(num_rows, scratch.output, [](Vec& even, Vec& odd) { join_pairs(even, odd); });
  }

  void prepare(const KvRows<T>& rows, const KvRows<T>* next, int num_rows) {
    current = &rows;
    int steps = 0;
    const int lines = head_size / kPairWidth;
    for (int row = 0; row < num_rows; row += kRows) {
      split(num_rows - row < kRows ? num_rows - row : kRows, [&](int, auto count) {
        constexpr int R = decltype(count)::value;
        steps += rows.count / kTokensAbreast<R> * lines + value_steps<R>(head_size, rows.count);
      });
    }
    upcoming = Prefetch<T>(next, head_size, steps);
  }
  void scores(int first_row, int rows, int begin, int end, float* scores) {
    const float* query = static_cast<const float*>(scratch.query) + static_cast<size_t>(first_row) * head_size;
    split(rows, [&](int r, auto count) {
      pair_scores<T, decltype(count)::value>(query + r * head_size, head_size, current->key, upcoming, begin, end,
                                             scores + r * kKvTile);
    });
  }
  void add_values(int first_row, int rows, const float* weights, int begin, int end, const float* rescale) {
    float* output = scratch.output + static_cast<size_t>(first_row) * head_size;
    split(rows, [&](int r, auto count) {
      constexpr int R = decltype(count)::value;
      pair_values<T, R, value_lines(R)>(weights + r * kKvTile, current->value, upcoming, head_size, begin, end, 0,
                                        rescale + r, output + r * head_size);
    });
  }
  void during_softmax(int, int) const {}
  void finish() { upcoming.rest(); }

  // Pairs of vectors that are summed at the same time: as many accumulators as elsewhere, or a whole row of head size
  // 128 in 32 registers.
  static constexpr int value_lines(int rows) {
    if (kDirectAccumulators < 16) return rows == 1 ? 4 : rows == 2 ? 2 : 1;
    return rows < 4 ? 4 : rows == 4 ? 2 : 1;
  }
  template <int R>
  static int value_steps(int head_size, int tokens) {
    constexpr int N = value_lines(R);
    return (head_size / kPairWidth + N - 1) / N * (tokens / kPairValuesPerStep<R>);
  }

 private:
  template <class F>
  static void split(int rows, F f) {
    DirectPanels<T>::template split<kRows>(rows, f);
  }
  template <class F>
  void for_each_pair(int num_rows, float* rows, F f) const {
    for (int i = 0; i < num_rows * head_size; i += kPairWidth) {
      Vec first = load(rows + i), second = load(rows + i + kWidth);
      f(first, second);
      store(rows + i, first);
      store(rows + i + kWidth, second);
    }
  }
};

}  // namespace
}  // namespace fastattention
