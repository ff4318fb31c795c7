// Few query rows (decode): unpacking would cost more than the arithmetic, so K and V are widened on the way from the
// cache into registers. Scores are dot products along the head dimension; kWidth of them are reduced together.
namespace fastattention {
namespace {

template <class T, int R>
void direct_scores(const float* query, int query_stride, const T* const* key, const T* const* upcoming, int head_size,
                   int begin, int end, float* scores) {
  constexpr int kTokens = kWidth / R;
  for (int column = begin; column < end; column += kTokens) {
    Vec sums[kWidth];
    FA_UNROLL
    for (int i = 0; i < kWidth; ++i) sums[i] = splat(0.0f);
    for_each_vector(head_size, [&](int d, auto part) {
      Vec q[R];
      FA_UNROLL
      for (int r = 0; r < R; ++r) q[r] = load(query + r * query_stride + d);
      const bool new_line = upcoming != nullptr && d * sizeof(T) % 64 == 0;
      FA_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        const Vec k = part.read(key[column + t] + d);
        if (new_line) __builtin_prefetch(upcoming[column + t] + d, 0, 2);
        FA_UNROLL
        for (int r = 0; r < R; ++r) sums[r * kTokens + t] = fma(q[r], k, sums[r * kTokens + t]);
      }
    });
    alignas(64) float products[kWidth];
    store(products, reduce_add_each(sums));
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      __builtin_memcpy(scores + r * kKvBlock + column, products + r * kTokens, kTokens * sizeof(float));
    }
  }
}

template <class T, int R, int N, class Part>
inline __attribute__((always_inline)) void direct_values_tile(const float* weights, const T* const* value,
                                                              const T* const* upcoming, int stride, int head_size,
                                                              int begin, int end, int d, const float* rescale,
                                                              float* output, Part part) {
  Vec c[R][N];
  FA_UNROLL
  for (int r = 0; r < R; ++r) {
    FA_UNROLL
    for (int n = 0; n < N; ++n) c[r][n] = splat(0.0f);
  }
  for (int i = begin; i < end; ++i) {
    if (upcoming != nullptr) prefetch_row(upcoming[i], head_size);
    Vec operand[N];
    FA_UNROLL
    for (int n = 0; n < N; ++n) operand[n] = part.read(value[i] + d + n * kWidth);
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(weights[r * kKvBlock + i]);
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
void direct_values(const float* weights, const T* const* value, const T* const* upcoming, int stride, int head_size,
                   int begin, int end, int d, const float* rescale, float* output) {
  for (; d + N * kWidth <= head_size; d += N * kWidth) {
    direct_values_tile<T, R, N>(weights, value, upcoming, stride, head_size, begin, end, d, rescale, output,
                                WholeVector());
    upcoming = nullptr;  // once per tile is enough
  }
  if constexpr (N > 1) {
    direct_values<T, R, N / 2>(weights, value, upcoming, stride, head_size, begin, end, d, rescale, output);
  } else if constexpr (kWidth > 8) {
    if (d == head_size) return;
    direct_values_tile<T, R, 1>(weights, value, upcoming, stride, head_size, begin, end, d, rescale, output,
                                HalfVector());
  }
}

template <class T>
struct DirectPanels {
  static constexpr int kRows = 4;
  const KvRows<T>* rows_ = nullptr;
  // The next tile's rows, fetched into the cache while this tile is computed; nullptr once that is done.
  const T* const* upcoming_key_ = nullptr;
  const T* const* upcoming_value_ = nullptr;

  void prepare(const KvRows<T>& rows, const KvRows<T>* upcoming, int, int) {
    const bool same_size = upcoming != nullptr && upcoming->count == rows.count;
    rows_ = &rows;
    upcoming_key_ = same_size ? upcoming->key : nullptr;
    upcoming_value_ = same_size ? upcoming->value : nullptr;
  }

  // Panels of 3 rows run as 2 + 1.
  template <class F>
  static void split(int rows, F f) {
    int r = 0;
    if (rows & 4) f(r, Constant<4>()), r += 4;
    if (rows & 2) f(r, Constant<2>()), r += 2;
    if (rows & 1) f(r, Constant<1>());
  }
  void scores(int rows, const float* query, int stride, int head_size, int begin, int end, float* scores) {
    split(rows, [&](int r, auto count) {
      direct_scores<T, decltype(count)::value>(query + r * stride, stride, rows_->key, upcoming_key_, head_size, begin,
                                               end, scores + r * kKvBlock);
      upcoming_key_ = nullptr;
    });
  }
  void add_values(int rows, const float* weights, int stride, int head_size, int begin, int end, const float* rescale,
                  float* output) {
    split(rows, [&](int r, auto count) {
      constexpr int R = decltype(count)::value;
      constexpr int kVectors = kDirectAccumulators / R < 8 ? kDirectAccumulators / R : 8;
      direct_values<T, R, kVectors>(weights + r * kKvBlock, rows_->value, upcoming_value_, stride, head_size, begin,
                                    end, 0, rescale + r, output + r * stride);
      upcoming_value_ = nullptr;
    });
  }
};

}  // namespace
}  // namespace fastattention
