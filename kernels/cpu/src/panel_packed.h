// Many query rows: K and V of the tile are packed once, and every panel of rows is multiplied with them in register
// tiles. The same code runs on fp32 FMA and on bf16 dot products. A Unit provides:
//   Element            the type of packed operands
//   kDepth             elements of the summed dimension that one instruction multiplies and adds in each lane
//   pack_keys, pack_values, broadcast, load_operand, accumulate
namespace fastattention {
namespace {

// True for weights that keep almost the precision of fp32.
template <class Weight>
constexpr bool kFullWeights = false;
template <>
constexpr bool kFullWeights<float> = true;

struct FmaUnit {
  using Element = float;
  static constexpr int kDepth = 1;

  static Vec broadcast(const float* p) { return splat(*p); }
  static Vec load_operand(const float* p) { return load(p); }
  static Vec accumulate(Vec a, Vec b, Vec c) { return fma(a, b, c); }

  // Transposes kWidth tokens from column on, so that one vector holds the same dimension of kWidth neighbouring tokens.
  template <class T>
  static void pack_keys(const KvRows<T>& rows, int column, int head_size, float* strip, int width,
                        Prefetch<T>& upcoming) {
    for_each_vector(head_size, [&](int d, auto part) {
      upcoming.advance();
      Vec block[kWidth];
      FA_UNROLL
      for (int i = 0; i < kWidth; ++i) block[i] = part.read(rows.key[column + i] + d);
      transpose(block);
      // Dimensions past head_size are written to the padding of the scratch matrix, which is never read.
      FA_UNROLL
      for (int i = 0; i < kWidth; ++i) store(strip + (d + i) * width, block[i]);
    });
  }
  template <class T>
  static void pack_values(const KvRows<T>& rows, int token, int head_size, int stride, float* values) {
    for_each_vector(head_size, [&](int d, auto part) {
      const int first = d / kStrip * kStrip;
      const int width = stride - first < kStrip ? stride - first : kStrip;
      store(values + first * kKvTile + token * width + (d - first), part.read(rows.value[token] + d));
    });
  }
};

// c[R][N vectors] = a[R][steps * kDepth] * b[steps][N vectors][kDepth]. The sums start at zero and stay in registers.
template <class Unit, int R, int N>
inline __attribute__((always_inline)) void multiply(const typename Unit::Element* a, int a_stride,
                                                    const typename Unit::Element* b, int b_width, int steps,
                                                    Vec (&c)[R][N]) {
  constexpr int kDepth = Unit::kDepth;
  FA_UNROLL
  for (int r = 0; r < R; ++r) {
    FA_UNROLL
    for (int n = 0; n < N; ++n) c[r][n] = splat(0.0f);
  }
  for (int k = 0; k < steps; ++k) {
    Vec operand[N];
    FA_UNROLL
    for (int n = 0; n < N; ++n) {
      operand[n] = Unit::load_operand(b + (static_cast<size_t>(k) * b_width + n * kWidth) * kDepth);
    }
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec factor = Unit::broadcast(a + r * a_stride + k * kDepth);
      FA_UNROLL
      for (int n = 0; n < N; ++n) c[r][n] = Unit::accumulate(factor, operand[n], c[r][n]);
    }
  }
}

// Calls tile(column, Constant<N>, width of its strip) for columns [begin, end), both multiples of kWidth. Whole strips
// come first, then the rest in smaller register tiles. begin is the start of a strip.
template <int N = kPanelVectors, class Tile>
inline void for_strips(int begin, int end, Tile tile) {
  if constexpr (N == kPanelVectors) {
    for (; begin + kStrip <= end; begin += kStrip) tile(begin, Constant<N>(), kStrip);
  } else if (begin + N * kWidth <= end) {
    return tile(begin, Constant<N>(), N * kWidth);
  }
  if constexpr (N > 1) {
    if (begin < end) for_strips<N - 1>(begin, end, tile);
  }
}

// Calls f with the row count as a compile-time constant, 1 <= rows <= R.
template <int R, class F>
inline void with_rows(int rows, F f) {
  if (rows == R) {
    f(Constant<R>());
  } else if constexpr (R > 1) {
    with_rows<R - 1>(rows, f);
  }
}

// Calls f(first row, Constant<count>) for groups of about the same size, of up to R rows: a small group would wait for
// its own sums.
template <int R, class F>
inline void for_row_groups(int rows, F f) {
  const int groups = (rows + R - 1) / R;
  for (int group = 0; group < groups; ++group) {
    const int first = rows * group / groups;
    with_rows<R>(rows * (group + 1) / groups - first, [&](auto count) { f(first, count); });
  }
}

// Packs the whole tile: keys as [strips][key_depth / kDepth][kStrip][kDepth], and value_rows values as [strips][kKvTile
// / kDepth][width of the strip][kDepth].
template <class Unit, class T>
void pack_tile(const KvRows<T>& rows, int head_size, int key_depth, int value_rows, int value_stride,
               const Scratch& scratch, Prefetch<T>& upcoming) {
  auto* keys = static_cast<typename Unit::Element*>(scratch.keys);
  auto* values = static_cast<typename Unit::Element*>(scratch.values);
  for (int column = 0; column < round_up(rows.count, kStrip); column += kWidth) {
    const int first = column / kStrip * kStrip;
    Unit::pack_keys(rows, column, head_size,
                    keys + static_cast<size_t>(first) * key_depth + (column - first) * Unit::kDepth, kStrip, upcoming);
  }
  for (int token = 0; token < value_rows; token += Unit::kDepth) {
    upcoming.advance();
    Unit::pack_values(rows, token, head_size, value_stride, values);
  }
}

template <class Unit, int R, class Upcoming>
void packed_scores(const typename Unit::Element* query, int query_stride, const typename Unit::Element* keys,
                   int key_depth, int begin, int end, float* scores, Upcoming& upcoming) {
  for_strips(begin, end, [&](int column, auto vectors, int width) {
    constexpr int N = decltype(vectors)::value;
    upcoming.advance();
    Vec c[R][N];
    multiply<Unit, R, N>(query, query_stride, keys + static_cast<size_t>(column) * key_depth, width,
                         key_depth / Unit::kDepth, c);
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      FA_UNROLL
      for (int n = 0; n < N; ++n) store(scores + r * kKvTile + column + n * kWidth, c[r][n]);
    }
  });
}

// output = output * rescale[row] + weights * values, over the tile's tokens [begin, end). The tile's sum is computed
// first and added once. Long sequences lose less precision this way, and rescaling is part of one FMA.
template <class Unit, int R, class Upcoming>
void packed_values(const typename Unit::Element* weights, const typename Unit::Element* values, int stride, int begin,
                   int end, const float* rescale, float* output, Upcoming& upcoming) {
  constexpr int kDepth = Unit::kDepth;
  // Weights outside [begin, end) are zero, so the first and last group of kDepth may extend past the range.
  begin = begin / kDepth * kDepth;
  for_strips(0, stride, [&](int column, auto vectors, int width) {
    constexpr int N = decltype(vectors)::value;
    upcoming.advance();
    Vec c[R][N];
    multiply<Unit, R, N>(weights + begin, kKvTile,
                         values + static_cast<size_t>(column) * kKvTile + static_cast<size_t>(begin) * width, width,
                         (end - begin + kDepth - 1) / kDepth, c);
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec factor = splat(rescale[r]);
      FA_UNROLL
      for (int n = 0; n < N; ++n) {
        float* to = output + r * stride + column + n * kWidth;
        store(to, fma(load(to), factor, c[r][n]));
      }
    }
  });
}

template <class T, class Unit>
struct PackedPanels {
  using Element = typename Unit::Element;
  using Weight = Element;
  static constexpr int kRows = kPanelRows;
  static constexpr bool kEven = true;
  const Scratch& scratch;
  int head_size;
  Prefetch<T> upcoming{};

  static int tile_tokens(int) { return kKvTile; }
  static int query_stride(int head_size) { return round_up(head_size, kWidth * Unit::kDepth); }
  static int output_stride(int head_size) { return round_up(head_size, kWidth); }

  void prepare(const KvRows<T>& rows, const KvRows<T>* next, int num_rows) {
    const int stride = output_stride(head_size);
    const int panels = (num_rows + kRows - 1) / kRows;
    const int strips = (rows.count + kStrip - 1) / kStrip + (stride + kStrip - 1) / kStrip;
    upcoming = Prefetch<T>(next, head_size,
                           (rows.count / kWidth) * (stride / kWidth) + rows.count / Unit::kDepth + panels * strips);
    pack_tile<Unit>(rows, head_size, query_stride(head_size), rows.count, stride, scratch, upcoming);
  }
  void scores(int first_row, int rows, int begin, int end, float* scores) {
    const int depth = query_stride(head_size);
    const Element* query = static_cast<const Element*>(scratch.query) + static_cast<size_t>(first_row) * depth;
    with_rows<kPanelRows>(rows, [&](auto count) {
      packed_scores<Unit, decltype(count)::value>(query, depth, static_cast<const Element*>(scratch.keys), depth, begin,
                                                  end, scores, upcoming);
    });
  }
  void add_values(int first_row, int rows, const Element* weights, int begin, int end, const float* rescale) {
    const int stride = output_stride(head_size);
    with_rows<kPanelRows>(rows, [&](auto count) {
      packed_values<Unit, decltype(count)::value>(weights, static_cast<const Element*>(scratch.values), stride, begin,
                                                  end, rescale,
                                                  scratch.output + static_cast<size_t>(first_row) * stride, upcoming);
    });
  }
  void during_softmax(int, int) const {}  // V is packed already
  void finish() { upcoming.rest(); }
  void arrange_queries(int) {}
  void arrange_output(int) {}
};

}  // namespace
}  // namespace fastattention
