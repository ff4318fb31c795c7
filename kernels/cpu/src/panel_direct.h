// Few query rows (decode): packing would take longer than the arithmetic, so K and V are widened on the way from the
// cache to registers. Scores are dot products along the head dimension, and kWidth of them are reduced together.
namespace fastattention {
namespace {

// Not inlined, like the function below: inlined together, the variants would compete for registers.
template <class T, int R>
__attribute__((noinline)) void direct_scores(const float* query, int query_stride, const T* const* key,
                                             Prefetch<T>& upcoming, int head_size, int begin, int end, float* scores) {
  constexpr int kTokens = kWidth / R;
  for (int column = begin; column < end; column += kTokens) {
    Vec sums[kWidth];
    FA_UNROLL
    for (int i = 0; i < kWidth; ++i) sums[i] = splat(0.0f);
    for_each_vector(head_size, [&](int d, auto part) {
      Vec q[R];
      FA_UNROLL
      for (int r = 0; r < R; ++r) q[r] = load(query + r * query_stride + d);
      if (d % (R * kWidth) == 0) upcoming.advance();
      FA_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        const Vec k = part.read(key[column + t] + d);
        FA_UNROLL
        for (int r = 0; r < R; ++r) sums[r * kTokens + t] = fma(q[r], k, sums[r * kTokens + t]);
      }
    });
    alignas(64) float products[kWidth];
    store(products, reduce_add_each(sums));
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      __builtin_memcpy(scores + r * kKvTile + column, products + r * kTokens, kTokens * sizeof(float));
    }
  }
}

// Steps between prefetches, such that each prefetch fetches about eight cache lines. More at once would stall the core.
template <int N>
constexpr int kValuesPerStep = 16 / N;

template <class T, int R, int N, class Part>
inline __attribute__((always_inline)) void direct_values_tile(const float* weights, const T* const* value,
                                                              Prefetch<T>& upcoming, int stride, int begin, int end,
                                                              int d, const float* rescale, float* output, Part part) {
  Vec c[R][N];
  FA_UNROLL
  for (int r = 0; r < R; ++r) {
    FA_UNROLL
    for (int n = 0; n < N; ++n) c[r][n] = splat(0.0f);
  }
  for (int i = begin; i < end; ++i) {
    if (i % kValuesPerStep<N> == 0) upcoming.advance();
    Vec operand[N];
    FA_UNROLL
    for (int n = 0; n < N; ++n) operand[n] = part.read(value[i] + d + n * kWidth);
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(weights[r * kKvTile + i]);
      FA_UNROLL
      for (int n = 0; n < N; ++n) c[r][n] = fma(weight, operand[n], c[r][n]);
    }
  }
  FA_UNROLL
  for (int r = 0; r < R; ++r) {
    const Vec factor = splat(rescale[r]);
    FA_UNROLL
    for (int n = 0; n < N; ++n) {
      float* to = output + r * stride + d + n * kWidth;
      store(to, fma(load(to), factor, c[r][n]));
    }
  }
}

template <class T, int R, int N>
__attribute__((noinline)) void direct_values(const float* weights, const T* const* value, Prefetch<T>& upcoming,
                                             int stride, int head_size, int begin, int end, int d, const float* rescale,
                                             float* output) {
  for (; d + N * kWidth <= head_size; d += N * kWidth) {
    direct_values_tile<T, R, N>(weights, value, upcoming, stride, begin, end, d, rescale, output, WholeVector());
  }
  if constexpr (N > 1) {
    direct_values<T, R, N / 2>(weights, value, upcoming, stride, head_size, begin, end, d, rescale, output);
  } else if constexpr (kWidth > 8) {
    if (d == head_size) return;
    direct_values_tile<T, R, 1>(weights, value, upcoming, stride, begin, end, d, rescale, output, HalfVector());
  }
}

template <class T>
struct DirectPanels {
  using Element = float;
  using Weight = float;
  static constexpr int kRows = kDirectRows;
  static constexpr bool kEven = false;
  const Scratch& scratch;
  int head_size;
  const KvRows<T>* current = nullptr;
  Prefetch<T> upcoming{};

  static int tile_tokens([[maybe_unused]] int num_rows) {
    if constexpr (kTuning.max_short_tile_rows > 0 && sizeof(T) == 2) {
      if (num_rows <= kTuning.max_short_tile_rows) return kColumnStep;
    }
    return kDirectTile;
  }
  static int query_stride(int head_size) { return round_up(head_size, kWidth); }
  static int output_stride(int head_size) { return round_up(head_size, kWidth); }

  void prepare(const KvRows<T>& rows, const KvRows<T>* next, int num_rows) {
    current = &rows;
    int steps = 0;
    const int vectors = (head_size + kWidth - 1) / kWidth;
    for (int row = 0; row < num_rows; row += kRows) {
      split(num_rows - row < kRows ? num_rows - row : kRows, [&](int, auto count) {
        constexpr int R = decltype(count)::value;
        constexpr int N = value_vectors(R);
        steps += rows.count * R / kWidth * ((vectors + R - 1) / R) +
                 ((vectors + N - 1) / N) * rows.count / kValuesPerStep<N>;
      });
    }
    upcoming = Prefetch<T>(next, head_size, steps);
  }

  // Output vectors that are summed at the same time.
  static constexpr int value_vectors(int rows) {
    return kDirectAccumulators / rows < 8 ? kDirectAccumulators / rows : 8;
  }
  // Splits rows into powers of two: 7 become 4 + 2 + 1.
  template <int R = kDirectRows, class F>
  static void split(int rows, F f, int first = 0) {
    if (rows & R) f(first, Constant<R>()), first += R;
    if constexpr (R > 1) split<R / 2>(rows & (R - 1), f, first);
  }
  void scores(int first_row, int rows, int begin, int end, float* scores) {
    const int stride = query_stride(head_size);
    const float* query = static_cast<const float*>(scratch.query) + static_cast<size_t>(first_row) * stride;
    split(rows, [&](int r, auto count) {
      direct_scores<T, decltype(count)::value>(query + r * stride, stride, current->key, upcoming, head_size, begin,
                                               end, scores + r * kKvTile);
    });
  }
  void add_values(int first_row, int rows, const float* weights, int begin, int end, const float* rescale) {
    const int stride = output_stride(head_size);
    float* output = scratch.output + static_cast<size_t>(first_row) * stride;
    split(rows, [&](int r, auto count) {
      constexpr int R = decltype(count)::value;
      direct_values<T, R, value_vectors(R)>(weights + r * kKvTile, current->value, upcoming, stride, head_size, begin,
                                            end, 0, rescale + r, output + r * stride);
    });
  }
  inline __attribute__((always_inline)) void during_softmax(int row, int rows) const {
    if (sizeof(T) == 2 && rows <= kTuning.max_short_tile_rows) fetch_values(*current, head_size, row, rows);
  }
  void finish() { upcoming.rest(); }
  void arrange_queries(int) {}
  void arrange_output(int) {}
};

}  // namespace
}  // namespace fastattention
