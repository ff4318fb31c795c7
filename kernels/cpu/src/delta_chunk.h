// A chunk of n tokens with matrix products. With c the decay since the chunk began and S the state before it,
//     x_i   = beta_i (v_i - c_i S^T k_i - sum_{j < i} c_i / c_j (k_i . k_j) x_j)
//     out_i = c_i S^T q_i + sum_{j <= i} c_i / c_j (q_i . k_j) x_j
//     S     = c_n S + sum_j c_n / c_j k_j x_j^T
// The columns of S, x and out do not depend on each other, so each strip of columns passes through all steps while it
// is in the L1 cache, and no inverse of the triangular matrix is needed.
namespace fastattention {
namespace {

// c[R][N vectors] += a[R][steps] * b[steps][N vectors].
template <int R, int N>
inline __attribute__((always_inline)) void multiply_add(const float* a, int row_stride, int step_stride, const float* b,
                                                        int b_stride, int steps, Vec (&c)[R][N]) {
  for (int k = 0; k < steps; ++k) {
    Vec operand[N];
    FA_UNROLL
    for (int n = 0; n < N; ++n) operand[n] = load(b + static_cast<size_t>(k) * b_stride + n * kWidth);
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec factor = splat(a[r * row_stride + static_cast<int64_t>(k) * step_stride]);
      FA_UNROLL
      for (int n = 0; n < N; ++n) c[r][n] = fma(factor, operand[n], c[r][n]);
    }
  }
}

// Calls f(first, Constant<R>) for panels of rows that cover [0, count).
template <class F>
inline void for_panels(int count, F f) {
  for (int first = 0; first < count; first += kPanelRows) {
    with_rows<kPanelRows>(count - first < kPanelRows ? count - first : kPanelRows, [&](auto rows) { f(first, rows); });
  }
}

// The state between memory and strips.
template <class S>
void load_state(const S* state, int key_size, int value_size, int value_stride, float* strips) {
  for_strips(0, value_stride, [&](int column, auto, int width) {
    for (int i = 0; i < key_size; ++i) {
      for_each_vector(value_size - column < width ? value_size - column : width, [&](int d, auto part) {
        store(strips + static_cast<size_t>(column) * key_size + i * width + d,
              part.read(state + static_cast<size_t>(i) * value_size + column + d));
      });
    }
  });
}
template <class S>
void store_state(const float* strips, int key_size, int value_size, int value_stride, S* state) {
  for_strips(0, value_stride, [&](int column, auto, int width) {
    for (int i = 0; i < key_size; ++i) {
      for_each_vector(value_size - column < width ? value_size - column : width, [&](int d, auto part) {
        part.write(state + static_cast<size_t>(i) * value_size + column + d,
                   load(strips + static_cast<size_t>(column) * key_size + i * width + d));
      });
    }
  });
}

// Every key and every query times every key before it, from scratch.rows.
inline void products_of_chunk(int key_size, int n, const DeltaScratch& scratch) {
  for (int token = 0; token < n; token += kWidth) {
    float* strip = scratch.keys + static_cast<size_t>(token / kStrip * kStrip) * key_size + token % kStrip;
    for (int d = 0; d < key_size; d += kWidth) {
      Vec block[kWidth];
      // Rows past the last key are queries or old; their products are not used.
      FA_UNROLL
      for (int i = 0; i < kWidth; ++i) block[i] = load(scratch.rows + (token + i) * scratch.key_stride + d);
      transpose(block);
      const int wanted = key_size - d < kWidth ? key_size - d : kWidth;
      for (int i = 0; i < wanted; ++i) store(strip + (d + i) * kStrip, block[i]);
    }
  }
  for (int column = 0; column < n; column += kStrip) {
    const float* strip = scratch.keys + static_cast<size_t>(column) * key_size;
    for (int part = 0; part < 2; ++part) {
      for_panels(n, [&](int first, auto rows) {
        constexpr int R = decltype(rows)::value;
        if (first + R <= column) return;
        Vec c[R][kPanelVectors];
        FA_UNROLL
        for (int r = 0; r < R; ++r) {
          FA_UNROLL
          for (int v = 0; v < kPanelVectors; ++v) c[r][v] = splat(0.0f);
        }
        multiply_add<R, kPanelVectors>(scratch.rows + (part * n + first) * scratch.key_stride, scratch.key_stride, 1,
                                       strip, kStrip, key_size, c);
        FA_UNROLL
        for (int r = 0; r < R; ++r) {
          FA_UNROLL
          for (int v = 0; v < kPanelVectors; ++v) {
            store(scratch.products + (part * n + first + r) * kChunk + column + v * kWidth, c[r][v]);
          }
        }
      });
    }
  }
}

// The two triangular matrices of one value head: -beta_i c_i / c_j (k_i . k_j) for j < i, and c_i / c_j (q_i . k_j) for
// j <= i. They are zero above the diagonal, up to the end of the panel that crosses it.
inline void weigh_products(int n, const DeltaScratch& scratch) {
  const int end = round_up(n, kWidth);
  for (int i = 0; i < n; ++i) {
    const Vec since = splat(scratch.since[i]), low = splat(scratch.since_low[i]), rate = splat(-scratch.beta[i]);
    const float* keys = scratch.products + i * kChunk;
    const float* queries = keys + n * kChunk;
    float* by_key = scratch.weights + i * kChunk;
    float* by_query = by_key + n * kChunk;
    int j = 0;
    for (; j <= i; j += kWidth) {
      const Vec between = add(sub(since, load(scratch.since + j)), sub(low, load(scratch.since_low + j)));
      // Above the diagonal the decay would be a growth, too large for exp2. What comes out there is left out below.
      const Vec decay = exp2(keep_range(between, splat(-kInfinity), j, 0, i + 1));
      store(by_key + j, keep_range(mul(rate, mul(decay, load(keys + j))), splat(0.0f), j, 0, i));
      store(by_query + j, keep_range(mul(decay, load(queries + j)), splat(0.0f), j, 0, i + 1));
    }
    for (; j < end; j += kWidth) {
      store(by_key + j, splat(0.0f));
      store(by_query + j, splat(0.0f));
    }
  }
}

// All steps for the N vectors of columns of a strip. values: the strip's columns of the values. state: the strip.
// On return the rows [n, 2 n) of scratch.strip are the output.
template <int N>
void chunk_strip(int key_size, int n, const DeltaScratch& scratch, const float* values, float* state) {
  constexpr int kColumns = N * kWidth;
  float* found = scratch.strip;
  float* out = found + n * kColumns;
  for_panels(2 * n, [&](int first, auto rows) {
    constexpr int R = decltype(rows)::value;
    Vec c[R][N];
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      FA_UNROLL
      for (int v = 0; v < N; ++v) c[r][v] = splat(0.0f);
    }
    multiply_add<R, N>(scratch.rows + first * scratch.key_stride, scratch.key_stride, 1, state, kColumns, key_size, c);
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      FA_UNROLL
      for (int v = 0; v < N; ++v) store(found + (first + r) * kColumns + v * kWidth, c[r][v]);
    }
  });

  // The triangular system, a panel of rows at a time; a panel's own triangle is solved in registers.
  for_panels(n, [&](int first, auto rows) {
    constexpr int R = decltype(rows)::value;
    Vec c[R][N];
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec decay = splat(scratch.decay[first + r]), beta = splat(scratch.beta[first + r]);
      FA_UNROLL
      for (int v = 0; v < N; ++v) {
        const Vec value = load(values + (first + r) * scratch.value_stride + v * kWidth);
        c[r][v] = mul(beta, sub(value, mul(decay, load(found + (first + r) * kColumns + v * kWidth))));
      }
    }
    const float* weights = scratch.weights + first * kChunk;
    multiply_add<R, N>(weights, kChunk, 1, found, kColumns, first, c);
    FA_UNROLL
    for (int j = 0; j < R; ++j) {
      FA_UNROLL
      for (int r = 0; r < R; ++r) {
        if (r <= j) continue;
        const Vec weight = splat(weights[r * kChunk + first + j]);
        FA_UNROLL
        for (int v = 0; v < N; ++v) c[r][v] = fma(weight, c[j][v], c[r][v]);
      }
    }
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      FA_UNROLL
      for (int v = 0; v < N; ++v) store(found + (first + r) * kColumns + v * kWidth, c[r][v]);
    }
  });

  for_panels(n, [&](int first, auto rows) {
    constexpr int R = decltype(rows)::value;
    Vec c[R][N];
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec decay = splat(scratch.decay[first + r]);
      FA_UNROLL
      for (int v = 0; v < N; ++v) c[r][v] = mul(decay, load(out + (first + r) * kColumns + v * kWidth));
    }
    multiply_add<R, N>(scratch.weights + (n + first) * kChunk, kChunk, 1, found, kColumns, first + R, c);
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      FA_UNROLL
      for (int v = 0; v < N; ++v) store(out + (first + r) * kColumns + v * kWidth, c[r][v]);
    }
  });

  for (int t = 0; t < n; ++t) {
    const Vec remain = splat(scratch.remain[t]);
    for (int d = 0; d < kColumns; d += kWidth) {
      store(found + t * kColumns + d, mul(remain, load(found + t * kColumns + d)));
    }
  }
  const Vec decay = splat(scratch.decay[n - 1]);
  for_panels(key_size, [&](int first, auto rows) {
    constexpr int R = decltype(rows)::value;
    Vec c[R][N];
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      FA_UNROLL
      for (int v = 0; v < N; ++v) c[r][v] = mul(decay, load(state + (first + r) * kColumns + v * kWidth));
    }
    multiply_add<R, N>(scratch.rows + first, 1, scratch.key_stride, found, kColumns, n, c);
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      FA_UNROLL
      for (int v = 0; v < N; ++v) store(state + (first + r) * kColumns + v * kWidth, c[r][v]);
    }
  });
}

}  // namespace
}  // namespace fastattention
