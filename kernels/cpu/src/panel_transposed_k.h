// More query rows than are read directly, fewer than make packing a whole tile worth while, on fp32 FMA. K is
// transposed a strip at a time, once for all rows: a vector then holds the scores of neighbouring tokens, and no sums
// are left to be reduced. V is read as it lies. A cache in bf16 is transposed in pairs of dimensions, half as many as
// in fp32, which are widened as in panel_pairs.h.
namespace fastattention {
namespace {

// The strip in fp32, [dimension][kStrip]. kDimensions: how many of them are multiplied between two steps of fetching
// ahead, so that as much is fetched during a tile's scores as during its values.
template <class T>
struct TransposedKeys {
  using Element = float;
  static constexpr int kDimensions = 16;

  static void turn(const KvRows<T>& rows, int column, int head_size, Element* strip, Prefetch<T>& upcoming) {
    for (int token = 0; token < kStrip; token += kWidth) {
      FmaUnit::pack_keys(rows, column + token, head_size, strip + token, kStrip, upcoming);
    }
  }
  static int turn_steps(int head_size) { return kPanelVectors * ((head_size + kWidth - 1) / kWidth); }
  // Dimensions d and d + 1 of kWidth tokens.
  static void read(const Element* strip, int d, int token, Vec& first, Vec& second) {
    first = load(strip + d * kStrip + token);
    second = load(strip + (d + 1) * kStrip + token);
  }

  template <int R>
  static void add_values(const float* weights, const T* const* value, Prefetch<T>& upcoming, int stride, int head_size,
                         int begin, int end, const float* rescale, float* output) {
    direct_values<T, R, kVectors<R>>(weights, value, upcoming, stride, head_size, begin, end, 0, rescale, output);
  }
  template <int R>
  static int value_steps(int head_size, int tokens) {
    const int vectors = (head_size + kWidth - 1) / kWidth;
    return (vectors + kVectors<R> - 1) / kVectors<R> * (tokens / kValuesPerStep<kVectors<R>>);
  }
  static void arrange_output(const Scratch&, int, int) {}

 private:
  // Of the output, at once: a power of two, as direct_values halves it for what is left.
  template <int R>
  static constexpr int kVectors = kDirectAccumulators / R >= 8   ? 8
                                  : kDirectAccumulators / R >= 4 ? 4
                                  : kDirectAccumulators / R >= 2 ? 2
                                                                 : 1;
};

#if defined(FA_BF16_PAIRS)
// The strip in bf16, [dimension / 2][kStrip][2].
template <class T>
struct TransposedPairs {
  using Element = T;
  static constexpr int kDimensions = 2;

  static void turn(const KvRows<T>& rows, int column, int head_size, Element* strip, Prefetch<T>& upcoming) {
    for (int token = 0; token < kStrip; token += kWidth) {
      for (int d = 0; d < head_size; d += kPairWidth) {
        upcoming.advance();
        Vec block[kWidth];
        FA_UNROLL
        for (int i = 0; i < kWidth; ++i) {
          block[i] = load(reinterpret_cast<const float*>(rows.key[column + token + i] + d));
        }
        transpose(block);
        FA_UNROLL
        for (int i = 0; i < kWidth; ++i) {
          store(reinterpret_cast<float*>(strip + (d + 2 * i) * kStrip + 2 * token), block[i]);
        }
      }
    }
  }
  static int turn_steps(int head_size) { return kPanelVectors * head_size / kPairWidth; }
  static void read(const Element* strip, int d, int token, Vec& first, Vec& second) {
    load_pairs(strip + d * kStrip + 2 * token, first, second);
  }

  template <int R>
  static void add_values(const float* weights, const T* const* value, Prefetch<T>& upcoming, int stride, int, int begin,
                         int end, const float* rescale, float* output) {
    pair_values<T, R, PairPanels<T>::value_lines(R)>(weights, value, upcoming, stride, begin, end, 0, rescale, output);
  }
  template <int R>
  static int value_steps(int head_size, int tokens) {
    return PairPanels<T>::template value_steps<R>(head_size, tokens);
  }
  static void arrange_output(const Scratch& scratch, int head_size, int num_rows) {
    PairPanels<T>{scratch, head_size}.arrange_output(num_rows);
  }
};
#endif

// Not inlined: as in panel_direct.h.
template <class Keys, int R, class Upcoming>
__attribute__((noinline)) void transposed_k_scores(const float* query, int stride, int head_size,
                                                   const typename Keys::Element* strip, Upcoming& upcoming,
                                                   float* scores) {
  Vec c[R][kPanelVectors];
  FA_UNROLL
  for (int r = 0; r < R; ++r) {
    FA_UNROLL
    for (int n = 0; n < kPanelVectors; ++n) c[r][n] = splat(0.0f);
  }
  for (int d = 0; d < head_size; d += 2) {
    if (d % Keys::kDimensions == 0) upcoming.advance();
    Vec first[kPanelVectors], second[kPanelVectors];
    FA_UNROLL
    for (int n = 0; n < kPanelVectors; ++n) Keys::read(strip, d, n * kWidth, first[n], second[n]);
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec a = splat(query[r * stride + d]), b = splat(query[r * stride + d + 1]);
      FA_UNROLL
      for (int n = 0; n < kPanelVectors; ++n) c[r][n] = fma(b, second[n], fma(a, first[n], c[r][n]));
    }
  }
  FA_UNROLL
  for (int r = 0; r < R; ++r) {
    FA_UNROLL
    for (int n = 0; n < kPanelVectors; ++n) store(scores + r * kKvTile + n * kWidth, c[r][n]);
  }
}

template <class T, class Keys>
struct TransposedKPanels {
  using Element = float;
  using Weight = float;
  static constexpr int kRows = kPadding;  // as many as the scratch memory has scores for
  const Scratch& scratch;
  int head_size;
  const KvRows<T>* current = nullptr;
  Prefetch<T> upcoming{};

  static int tile_tokens(int) { return kDirectTile; }
  static int query_stride(int head_size) { return round_up(head_size, kWidth); }
  static int output_stride(int head_size) { return round_up(head_size, kWidth); }
  void arrange_queries(int) {}
  void arrange_output(int num_rows) { Keys::arrange_output(scratch, head_size, num_rows); }

  void prepare(const KvRows<T>& rows, const KvRows<T>* next, int num_rows) {
    current = &rows;
    const int strips = (rows.count + kStrip - 1) / kStrip;
    int steps = 0;
    for (int row = 0; row < num_rows; row += kRows) {
      steps += strips * Keys::turn_steps(head_size);
      split(num_rows - row < kRows ? num_rows - row : kRows, [&](int, auto count) {
        steps += strips * ((head_size + Keys::kDimensions - 1) / Keys::kDimensions);
        steps += Keys::template value_steps<decltype(count)::value>(head_size, rows.count);
      });
    }
    upcoming = Prefetch<T>(next, head_size, steps);
  }
  void scores(int first_row, int rows, int begin, int end, float* scores) {
    const int stride = query_stride(head_size);
    const float* query = static_cast<const float*>(scratch.query) + static_cast<size_t>(first_row) * stride;
    auto* strip = static_cast<typename Keys::Element*>(scratch.keys);
    for (int column = begin; column < end; column += kStrip) {
      Keys::turn(*current, column, head_size, strip, upcoming);
      split(rows, [&](int r, auto count) {
        transposed_k_scores<Keys, decltype(count)::value>(query + r * stride, stride, head_size, strip, upcoming,
                                                          scores + r * kKvTile + column);
      });
    }
  }
  void add_values(int first_row, int rows, const float* weights, int begin, int end, const float* rescale) {
    const int stride = output_stride(head_size);
    float* output = scratch.output + static_cast<size_t>(first_row) * stride;
    split(rows, [&](int r, auto count) {
      Keys::template add_values<decltype(count)::value>(weights + r * kKvTile, current->value, upcoming, stride,
                                                        head_size, begin, end, rescale + r, output + r * stride);
    });
  }
  void finish() { upcoming.rest(); }

 private:
  // kDirectRows at a time, then what is left at once.
  template <int R = kDirectRows, class F>
  static void split(int rows, F f, int first = 0) {
    for (; rows >= R; rows -= R, first += R) f(first, Constant<R>());
    if constexpr (R > 1) split<R - 1>(rows, f, first);
  }
};

}  // namespace
}  // namespace fastattention
