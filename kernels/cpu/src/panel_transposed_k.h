// Too many query rows for the direct panels and too few to pack a whole tile, on fp32 FMA. K is transposed one strip at
// a time for all rows. A vector then holds the scores of neighbouring tokens, which need no reduction. V is read
// without packing. A bf16 cache is transposed in pairs of dimensions, which is half the work of fp32, and the pairs are
// widened as in panel_pairs.h.
namespace fastattention {
namespace {

// A strip in fp32, [dimension][kStrip]. kDimensions: dimensions that are multiplied between two prefetch steps, chosen
// so that a tile's scores prefetch as much as its values.
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
  // Reads dimensions d and d + 1 of kWidth tokens.
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
  // Output vectors at the same time: a power of two, because direct_values halves it for the rest.
  template <int R>
  static constexpr int kVectors = kTransposedAccumulators / R >= 8   ? 8
                                  : kTransposedAccumulators / R >= 4 ? 4
                                  : kTransposedAccumulators / R >= 2 ? 2
                                                                     : 1;
};

#if defined(FA_BF16_PAIRS)
// A strip in bf16, [dimension / 2][kStrip][2].
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

// Not inlined; panel_direct.h gives the reason.
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
  static constexpr int kRows = kPadding;  // scratch memory has scores for this many rows
  static constexpr bool kEven = true;
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
      for_row_groups<kTransposedRows>(num_rows - row < kRows ? num_rows - row : kRows, [&](int, auto count) {
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
      for_row_groups<kTransposedRows>(rows, [&](int r, auto count) {
        transposed_k_scores<Keys, decltype(count)::value>(query + r * stride, stride, head_size, strip, upcoming,
                                                          scores + r * kKvTile + column);
      });
    }
  }
  void add_values(int first_row, int rows, const float* weights, int begin, int end, const float* rescale) {
    const int stride = output_stride(head_size);
    float* output = scratch.output + static_cast<size_t>(first_row) * stride;
    for_row_groups<kTransposedRows>(rows, [&](int r, auto count) {
      Keys::template add_values<decltype(count)::value>(weights + r * kKvTile, current->value, upcoming, stride,
                                                        head_size, begin, end, rescale + r, output + r * stride);
    });
  }
  inline __attribute__((always_inline)) void during_softmax(int row, int rows) const {
    if constexpr (sizeof(T) == 2) fetch_values(*current, head_size, row, rows);
  }
  void finish() { upcoming.rest(); }
};

}  // namespace
}  // namespace fastattention
