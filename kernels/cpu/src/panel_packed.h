// Many query rows: K and V of the tile are unpacked once to fp32 (K transposed) and every panel of kPanelRows rows
// multiplies against them with register-tiled FMA.
namespace fastattention {
namespace {

// keys[d][column]: transposed, so that one vector holds the same dimension of kWidth neighbouring tokens.
template <class T>
void pack_keys(const KvRows<T>& rows, int head_size, float* keys) {
  for (int column = 0; column < rows.count; column += kWidth) {
    for_each_vector(head_size, [&](int d, auto part) {
      Vec block[kWidth];
      FA_UNROLL
      for (int i = 0; i < kWidth; ++i) block[i] = part.read(rows.key[column + i] + d);
      transpose(block);
      // Dimensions past head_size land in the padding of the scratch matrix and are never read.
      FA_UNROLL
      for (int i = 0; i < kWidth; ++i) store(keys + (d + i) * kKvBlock + column, block[i]);
    });
  }
}

template <class T>
void pack_values(const KvRows<T>& rows, int head_size, int stride, float* values) {
  for (int i = 0; i < rows.count; ++i) {
    float* row = values + static_cast<size_t>(i) * stride;
    for_each_vector(head_size, [&](int d, auto part) { store(row + d, part.read(rows.value[i] + d)); });
  }
}

// c[R][N vectors] = a[R][depth] * b[depth][N vectors], all row-major. The sum over depth starts from zero in registers.
template <int R, int N>
inline __attribute__((always_inline)) void multiply(const float* a, int a_stride, const float* b, int b_stride,
                                                    int depth, Vec (&c)[R][N]) {
  FA_UNROLL
  for (int r = 0; r < R; ++r) {
    FA_UNROLL
    for (int n = 0; n < N; ++n) c[r][n] = splat(0.0f);
  }
  for (int k = 0; k < depth; ++k) {
    Vec operand[N];
    FA_UNROLL
    for (int n = 0; n < N; ++n) operand[n] = load(b + static_cast<size_t>(k) * b_stride + n * kWidth);
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec factor = splat(a[r * a_stride + k]);
      FA_UNROLL
      for (int n = 0; n < N; ++n) c[r][n] = fma(factor, operand[n], c[r][n]);
    }
  }
}

// Columns [begin, end), both multiples of kWidth, N vectors at a time, then what is left with smaller tiles.
template <int N, class Tile>
inline void for_column_tiles(int begin, int end, Tile tile) {
  for (; begin + N * kWidth <= end; begin += N * kWidth) tile(begin, Constant<N>());
  if constexpr (N > 1) {
    if (begin < end) for_column_tiles<N - 1>(begin, end, tile);
  }
}

template <int R>
void packed_scores(const float* query, int query_stride, const float* keys, int head_size, int begin, int end,
                   float* scores) {
  for_column_tiles<kPanelVectors>(begin, end, [&](int column, auto vectors) {
    constexpr int N = decltype(vectors)::value;
    Vec c[R][N];
    multiply<R, N>(query, query_stride, keys + column, kKvBlock, head_size, c);
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      FA_UNROLL
      for (int n = 0; n < N; ++n) store(scores + r * kKvBlock + column + n * kWidth, c[r][n]);
    }
  });
}

// output = output * rescale[row] + weights * values, over tile tokens [begin, end).
// The tile's own sum is formed first and added once: long sequences lose less precision, and rescaling is one FMA.
template <int R>
void packed_values(const float* weights, const float* values, int stride, int begin, int end, const float* rescale,
                   float* output) {
  for_column_tiles<kPanelVectors>(0, stride, [&](int column, auto vectors) {
    constexpr int N = decltype(vectors)::value;
    Vec c[R][N];
    multiply<R, N>(weights + begin, kKvBlock, values + static_cast<size_t>(begin) * stride + column, stride,
                   end - begin, c);
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

// Calls f with the row count as a compile-time constant, 1 <= rows <= kPanelRows.
template <int R = kPanelRows, class F>
inline void with_panel_rows(int rows, F f) {
  if (rows == R) {
    f(Constant<R>());
  } else if constexpr (R > 1) {
    with_panel_rows<R - 1>(rows, f);
  }
}

template <class T>
struct PackedPanels {
  static constexpr int kRows = kPanelRows;
  float* keys;
  float* values;

  void prepare(const KvRows<T>& rows, const KvRows<T>*, int head_size, int stride) {
    pack_keys(rows, head_size, keys);
    pack_values(rows, head_size, stride, values);
  }
  void scores(int rows, const float* query, int stride, int head_size, int begin, int end, float* scores) {
    with_panel_rows(rows, [&](auto count) {
      packed_scores<decltype(count)::value>(query, stride, keys, head_size, begin, end, scores);
    });
  }
  void add_values(int rows, const float* weights, int stride, int, int begin, int end, const float* rescale,
                  float* output) {
    with_panel_rows(rows, [&](auto count) {
      packed_values<decltype(count)::value>(weights, values, stride, begin, end, rescale, output);
    });
  }
};

}  // namespace
}  // namespace fastattention
