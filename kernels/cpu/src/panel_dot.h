// Few query rows in bf16 over a bf16 cache, with the bf16 dot product on K and V as they lie. It multiplies and adds
// two numbers per lane, so nothing is widened. Where as many of these instructions run in a cycle as of fp32
// multiply-adds (Zen 4), two rows take the time of one.
//
// K: neighbouring dimensions are pairs already. Up to kMaxRowsByLine rows multiply whole cache lines, and kWidth sums
// are reduced together. For more rows reducing would take longer than transposing K a strip at a time.
// V: pairs are two tokens. Their lines are interleaved on the way to registers, once for a group of rows. The
// instructions that interleave within 128-bit lanes change the order of dimensions, which is undone in the output.
namespace fastattention {
namespace {

constexpr int kDotLine = 2 * kWidth;  // bf16 numbers of a vector, which is a cache line
constexpr int kMaxRowsByLine = 4;

inline Vec dot(Vec a, __m512i b, Vec c) { return _mm512_dpbf16_ps(c, (__m512bh)bits(a), (__m512bh)b); }

// Tokens whose sums with R rows are reduced together. Three rows count as four, of which the last is zero.
template <int R>
constexpr int kDotTokens = kWidth / (R == 3 ? 4 : R);
// Of these, the tokens that are multiplied at the same time, because a sum has to wait for its last product.
template <int R>
constexpr int kDotTokensAbreast = kDotTokens<R> < 8 ? kDotTokens<R> : 8;

// Not inlined, like the functions below; panel_direct.h gives the reason.
template <class T, int R>
__attribute__((noinline)) void dot_scores(const BFloat16* query, int head_size, const T* const* key,
                                          Prefetch<T>& upcoming, int begin, int end, float* scores) {
  constexpr int kTokens = kDotTokens<R>;
  constexpr int kAbreast = kDotTokensAbreast<R>;
  for (int column = begin; column < end; column += kTokens) {
    Vec sums[kWidth];
    FA_UNROLL
    for (int i = 0; i < kWidth; ++i) sums[i] = splat(0.0f);
    FA_UNROLL
    for (int first = 0; first < kTokens; first += kAbreast) {
      for (int d = 0; d < head_size; d += kDotLine) {
        upcoming.advance();
        Vec q[R];
        FA_UNROLL
        for (int r = 0; r < R; ++r) q[r] = Bf16Unit::load_operand(query + r * head_size + d);
        FA_UNROLL
        for (int t = first; t < first + kAbreast; ++t) {
          const __m512i k = _mm512_loadu_si512(key[column + t] + d);
          FA_UNROLL
          for (int r = 0; r < R; ++r) sums[r * kTokens + t] = dot(q[r], k, sums[r * kTokens + t]);
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

template <int R, class Upcoming>
__attribute__((noinline)) void strip_scores(const BFloat16* query, int head_size, const BFloat16* strip, float* scores,
                                            Upcoming& upcoming) {
  packed_scores<Bf16Unit, R>(query, head_size, strip, head_size, 0, kStrip, scores, upcoming);
}

// Adds two tokens to N lines of R rows. weight(p) broadcasts those at p; load(token, line) reads V.
template <int R, int N, class Weight, class Load>
inline __attribute__((always_inline)) void add_two_tokens(const BFloat16* weights, Vec (&c)[R][2 * N], Weight weight,
                                                          Load load) {
  __m512i operand[2 * N];
  FA_UNROLL
  for (int n = 0; n < N; ++n) {
    const __m512i first = load(0, n), second = load(1, n);
    operand[2 * n] = _mm512_unpacklo_epi16(first, second);
    operand[2 * n + 1] = _mm512_unpackhi_epi16(first, second);
  }
  FA_UNROLL
  for (int r = 0; r < R; ++r) {
    const Vec factor = weight(weights + r * kKvTile);
    FA_UNROLL
    for (int n = 0; n < 2 * N; ++n) c[r][n] = dot(factor, operand[n], c[r][n]);
  }
}

// Computes N cache lines of each row at the same time.
template <class T, int R, int N>
__attribute__((noinline)) void dot_values(const BFloat16* weights, const T* const* value, Prefetch<T>& upcoming,
                                          int head_size, int begin, int end, int d, const float* rescale,
                                          float* output) {
  for (; d + N * kDotLine <= head_size; d += N * kDotLine) {
    Vec c[R][2 * N];
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      FA_UNROLL
      for (int n = 0; n < 2 * N; ++n) c[r][n] = splat(0.0f);
    }
    int i = begin;
    for (; i + 2 <= end; i += 2) {
      upcoming.advance();
      add_two_tokens<R, N>(weights + i, c, Bf16Unit::broadcast,
                           [&](int token, int n) { return _mm512_loadu_si512(value[i + token] + d + n * kDotLine); });
    }
    // No row sees the token after the last. Its numbers may be NaN, and so may its weights if this is the last column.
    if (i < end) {
      const auto single = [](const BFloat16* weight) { return bits(_mm512_set1_epi32(weight->bits)); };
      add_two_tokens<R, N>(weights + i, c, single, [&](int token, int n) {
        return token == 0 ? _mm512_loadu_si512(value[i] + d + n * kDotLine) : _mm512_setzero_si512();
      });
    }
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec factor = splat(rescale[r]);
      FA_UNROLL
      for (int n = 0; n < 2 * N; ++n) {
        float* to = output + r * head_size + d + n * kWidth;
        store(to, fma(load(to), factor, c[r][n]));
      }
    }
  }
  if constexpr (N > 1) {
    if (d < head_size) dot_values<T, R, N / 2>(weights, value, upcoming, head_size, begin, end, d, rescale, output);
  }
}

inline bool can_dot(const fa_attention_problem& problem) { return problem.head_size % kDotLine == 0; }

template <class T, int Tile>
struct DotPanels {
  using Element = BFloat16;
  using Weight = BFloat16;
  static constexpr int kRows = kPadding;  // scratch memory has scores for this many rows
  static constexpr bool kEven = true;
  const Scratch& scratch;
  int head_size;
  const KvRows<T>* current = nullptr;
  Prefetch<T> upcoming{};

  static_assert(Tile % kColumnStep == 0 && Tile <= kKvTile, "a tile is a whole number of column steps");
  static int tile_tokens(int) { return Tile; }
  static int query_stride(int head_size) { return head_size; }
  static int output_stride(int head_size) { return head_size; }
  void arrange_queries(int) {}
  void arrange_output(int num_rows) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int i = 0; i < num_rows * head_size; i += kDotLine) {
      const Vec first = load(scratch.output + i), second = load(scratch.output + i + kWidth);
      store(scratch.output + i, _mm512_permutex2var_ps(first, low, second));
      store(scratch.output + i + kWidth, _mm512_permutex2var_ps(first, high, second));
    }
  }

  void prepare(const KvRows<T>& rows, const KvRows<T>* next, int num_rows) {
    current = &rows;
    const int lines = head_size / kDotLine;
    const int columns = round_up(rows.count, kColumnStep);
    int steps = 0;
    for (int row = 0; row < num_rows; row += kRows) {
      const int panel_rows = num_rows - row < kRows ? num_rows - row : kRows;
      if (panel_rows > kMaxRowsByLine) steps += columns / kWidth * lines * kStepsPerBlock;
      for_row_groups<kGroup>(panel_rows, [&](int, auto count) {
        constexpr int R = decltype(count)::value;
        constexpr int N = value_lines(R);
        steps += panel_rows > kMaxRowsByLine ? columns / kStrip : columns / kDotTokensAbreast<R> * lines;
        steps += (lines + N - 1) / N * (rows.count / 2);
      });
      steps += softmax_steps(panel_rows) * panel_rows;
    }
    upcoming = Prefetch<T>(next, head_size, steps);
  }
  void scores(int first_row, int rows, int begin, int end, float* scores) {
    const BFloat16* query = static_cast<const BFloat16*>(scratch.query) + static_cast<size_t>(first_row) * head_size;
    if (rows <= kMaxRowsByLine) {
      return with_rows<kMaxRowsByLine>(rows, [&](auto count) {
        dot_scores<T, decltype(count)::value>(query, head_size, current->key, upcoming, begin, end, scores);
      });
    }
    auto* strip = static_cast<BFloat16*>(scratch.keys);
    for (int column = begin; column < end; column += kStrip) {
      for (int token = 0; token < kStrip; token += kWidth) {
        Bf16Unit::pack_keys(*current, column + token, head_size, strip + token * Bf16Unit::kDepth, kStrip, upcoming);
      }
      for_row_groups<kGroup>(rows, [&](int r, auto count) {
        strip_scores<decltype(count)::value>(query + r * head_size, head_size, strip, scores + r * kKvTile + column,
                                             upcoming);
      });
    }
  }
  void add_values(int first_row, int rows, const BFloat16* weights, int begin, int end, const float* rescale) {
    float* output = scratch.output + static_cast<size_t>(first_row) * head_size;
    for_row_groups<kGroup>(rows, [&](int r, auto count) {
      constexpr int R = decltype(count)::value;
      dot_values<T, R, value_lines(R)>(weights + r * kKvTile, current->value, upcoming, head_size, begin, end, 0,
                                       rescale + r, output + r * head_size);
    });
  }
  // With few rows, the products are so short that memory would be idle during the softmax.
  void during_softmax(int row, int rows) {
    for (int i = 0; i < softmax_steps(rows); ++i) upcoming.advance();
    fetch_values(*current, head_size, row, rows);
  }
  void finish() { upcoming.rest(); }

 private:
  static constexpr int kGroup = 8;          // rows that are multiplied with V at the same time
  static constexpr int kStepsPerBlock = 2;  // of Bf16Unit::pack_keys
  static int softmax_steps(int rows) { return 12 / rows; }
  // Lines that are summed at the same time, in up to 16 registers.
  static constexpr int value_lines(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }
};

}  // namespace
}  // namespace fastattention
