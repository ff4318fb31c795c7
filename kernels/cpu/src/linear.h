// Linear layers, y = x * weight^T + bias, with the weight in rows as checkpoints store it. Products and sums are fp32.
//
// Few tokens: the weight is streamed from memory, and each vector of it is multiplied with all tokens of a group while
// it is in registers. A sum's lanes add every kLinearStep-th element, so it does not depend on the other tokens.
// Many tokens: as in panel_packed.h, a part of the weight is transposed into strips of fp32, which panels of tokens are
// multiplied with. Either way the tokens are converted to fp32 before.
#include <type_traits>

namespace fastattention {
namespace {

constexpr int kLinearStep = 2 * kWidth;
constexpr int kTokensAtOnce = 4;
constexpr int kFewTokens = kTuning.linear_few_tokens;
constexpr int kLinearDepth = 512;  // of a transposed part of the weight
constexpr int kLinearOutputs = 2 * kStrip;
static_assert(kLinearDepth % kWidth == 0, "only the last part ends within a vector");

// Two vectors of neighbours, in the order in which few tokens are arranged: pairs of bf16 are cheaper to separate.
template <class T>
inline void load_step(const T* p, Vec& a, Vec& b) {
  a = load(p);
  b = load(p + kWidth);
}
#if defined(FA_BF16_PAIRS)
inline void load_step(const BFloat16* p, Vec& a, Vec& b) { load_pairs(p, a, b); }
#endif

// [tokens / kTokensAtOnce][in / kLinearStep][tokens of the group][kLinearStep], zeros from in_features on.
template <class T>
void arrange_few(const fa_linear& problem, float* to) {
  const T* x = static_cast<const T*>(problem.x);
  const int whole = problem.in_features / kLinearStep * kLinearStep, rest = problem.in_features - whole;
  const int tokens = static_cast<int>(problem.num_tokens);
  for (int first = 0; first < tokens; first += kTokensAtOnce) {
    const int group = tokens - first < kTokensAtOnce ? tokens - first : kTokensAtOnce;
    for (int k = 0; k < problem.in_features; k += kLinearStep) {
      for (int t = first; t < first + group; ++t, to += kLinearStep) {
        const T* from = x + t * problem.x_stride + k;
        T part[kLinearStep] = {};
        if (k == whole) {
          __builtin_memcpy(part, from, static_cast<size_t>(rest) * sizeof(T));
          from = part;
        }
        Vec a, b;
        load_step(from, a, b);
        store(to, a);
        store(to + kWidth, b);
      }
    }
  }
}

// sums[token][row] for R rows of the weight and T tokens.
template <class T, int R, int N>
__attribute__((noinline)) void multiply_rows(const T* weight, int64_t stride, const float* x, int in_features,
                                             float* sums, int sums_stride) {
  constexpr int kLine = 64 / sizeof(T);
  Vec sum[R][N];
  FA_UNROLL
  for (int r = 0; r < R; ++r) {
    FA_UNROLL
    for (int n = 0; n < N; ++n) sum[r][n] = splat(0.0f);
  }
  const auto step = [&](int r, const T* from) __attribute__((always_inline)) {
    Vec a, b;
    load_step(from, a, b);
    FA_UNROLL
    for (int n = 0; n < N; ++n) sum[r][n] = fma(load(x + n * kLinearStep), a, sum[r][n]);
    FA_UNROLL
    for (int n = 0; n < N; ++n) sum[r][n] = fma(load(x + n * kLinearStep + kWidth), b, sum[r][n]);
  };
  int k = 0;
  for (; k + kLinearStep <= in_features; k += kLinearStep, x += N * kLinearStep) {
    FA_UNROLL
    for (int r = 0; r < R; ++r) {
      const T* row = weight + r * stride + k;
      FA_UNROLL
      for (int i = 0; i < kLinearStep; i += kLine) {
        if (kLinearStep >= kLine || k % kLine == 0) __builtin_prefetch(row + R * stride + i, 0, 3);
      }
      step(r, row);
    }
  }
  if (k < in_features) {
    for (int r = 0; r < R; ++r) {
      T part[kLinearStep] = {};
      __builtin_memcpy(part, weight + r * stride + k, static_cast<size_t>(in_features - k) * sizeof(T));
      step(r, part);
    }
  }
  FA_UNROLL
  for (int first = 0; first < R * N; first += kWidth) {
    Vec some[kWidth];
    FA_UNROLL
    for (int i = 0; i < kWidth; ++i) some[i] = first + i < R * N ? sum[(first + i) / N][(first + i) % N] : splat(0.0f);
    alignas(64) float reduced[kWidth];
    store(reduced, reduce_add_each(some));
    FA_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      if (first + i < R * N) sums[(first + i) % N * sums_stride + (first + i) / N] = reduced[i];
    }
  }
}

// y[token][begin to end) = sums + bias, for count tokens from first on.
template <class T>
void write_outputs(const fa_linear& problem, int64_t first, int count, int begin, int end, const float* sums,
                   int sums_stride) {
  const T* bias = static_cast<const T*>(problem.bias);
  for (int t = 0; t < count; ++t, sums += sums_stride) {
    T* y = static_cast<T*>(problem.y) + (first + t) * problem.y_stride;
    for (int i = begin; i < end; i += kWidth) {
      const bool whole = i + kWidth <= end;
      Vec value = load(sums + i - begin);
      if (bias != nullptr) value = add(value, whole ? load(bias + i) : load_first(bias + i, end - i));
      if (whole) {
        store(y + i, value);
      } else {
        store_first(y + i, value, end - i);
      }
    }
  }
}

// Rows of the weight at once: as many sums as registers allow.
template <int N>
constexpr int kRowsAtOnce = kTuning.linear_sums / N < 8 ? kTuning.linear_sums / N : 8;

template <class T>
void linear_few(const fa_linear& problem, const float* x, int begin, int end) {
  alignas(64) float sums[kFewTokens * kMaxLinearRows + kWidth];
  const T* weight = static_cast<const T*>(problem.weight) + begin * problem.weight_stride;
  const int rows = end - begin, tokens = static_cast<int>(problem.num_tokens);
  const int64_t token_floats = round_up(problem.in_features, kLinearStep);
  const auto tokens_from = [&](int row, int first, auto count, auto rows_at_once) {
    multiply_rows<T, decltype(rows_at_once)::value, decltype(count)::value>(
        weight + row * problem.weight_stride, problem.weight_stride, x + first * token_floats, problem.in_features,
        sums + first * kMaxLinearRows + row, kMaxLinearRows);
  };
  // Groups of kTokensAtOnce tokens one after another, so that the rows stay in the L1 cache, and then the rest.
  const int grouped = tokens / kTokensAtOnce * kTokensAtOnce;
  const auto group = [&](auto count, int first, int last) {
    constexpr int R = kRowsAtOnce<decltype(count)::value>;
    int row = 0;
    for (; row + R <= rows; row += R) {
      for (int t = first; t < last; t += kTokensAtOnce) tokens_from(row, t, count, Constant<R>());
    }
    for (; row < rows; ++row) {
      for (int t = first; t < last; t += kTokensAtOnce) tokens_from(row, t, count, Constant<1>());
    }
  };
  if (grouped > 0) group(Constant<kTokensAtOnce>(), 0, grouped);
  if (tokens > grouped) {
    with_rows<kTokensAtOnce - 1>(tokens - grouped, [&](auto count) { group(count, grouped, tokens); });
  }
  write_outputs<T>(problem, 0, tokens, begin, end, sums, kMaxLinearRows);
}

// [in / kLinearDepth][tokens][kLinearDepth]
template <class T>
void arrange_many(const fa_linear& problem, float* to, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(problem.x);
  for (int k = 0; k < problem.in_features; k += kLinearDepth) {
    const int depth = problem.in_features - k < kLinearDepth ? problem.in_features - k : kLinearDepth;
    for (int64_t t = begin; t < end; ++t) {
      const T* from = x + t * problem.x_stride + k;
      float* row = to + (k / kLinearDepth * problem.num_tokens + t) * kLinearDepth;
      int i = 0;
      for (; i + kWidth <= depth; i += kWidth) store(row + i, load(from + i));
      if (i < depth) store(row + i, load_first(from + i, depth - i));
    }
  }
}

// One strip of fp32: [depth][kStrip]. Rows past the last one repeat it.
template <class T>
void transpose_strip(const T* const (&rows)[kStrip], int depth, float* strip) {
  for (int column = 0; column < kStrip; column += kWidth) {
    for (int k = 0; k < depth; k += kWidth) {
      const int count = depth - k;
      Vec block[kWidth];
      FA_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        const T* from = rows[column + i] + k;
        block[i] = count >= kWidth ? load(from) : load_first(from, count);
      }
      transpose(block);
      FA_UNROLL
      for (int i = 0; i < kWidth; ++i) store(strip + (k + i) * kStrip + column, block[i]);
    }
  }
}

template <int R>
__attribute__((noinline)) void multiply_panel(const float* x, const float* strip, int depth, bool first, float* sums) {
  Vec c[R][kPanelVectors];
  multiply<FmaUnit, R, kPanelVectors>(x, kLinearDepth, strip, kStrip, depth, c);
  FA_UNROLL
  for (int r = 0; r < R; ++r) {
    FA_UNROLL
    for (int n = 0; n < kPanelVectors; ++n) {
      float* sum = sums + r * kLinearOutputs + n * kWidth;
      store(sum, first ? c[r][n] : add(load(sum), c[r][n]));
    }
  }
}

struct LinearScratch {
  alignas(64) float sums[kLinearTokens * kLinearOutputs];
  alignas(64) float strip[kLinearDepth * kStrip];
};

template <class T>
void linear_many(const fa_linear& problem, const float* x, int64_t first_token, int first_output, void* memory) {
  LinearScratch& scratch = *static_cast<LinearScratch*>(memory);
  const int left = problem.out_features - first_output, outputs = left < kLinearOutputs ? left : kLinearOutputs;
  const int64_t waiting = problem.num_tokens - first_token;
  const int tokens = waiting < kLinearTokens ? static_cast<int>(waiting) : kLinearTokens;
  for (int k = 0; k < problem.in_features; k += kLinearDepth) {
    const int depth = problem.in_features - k < kLinearDepth ? problem.in_features - k : kLinearDepth;
    const float* part = x + (k / kLinearDepth * problem.num_tokens + first_token) * kLinearDepth;
    for (int column = 0; column < outputs; column += kStrip) {
      const T* rows[kStrip];
      for (int i = 0; i < kStrip; ++i) {
        const int row = column + i < outputs ? column + i : outputs - 1;
        rows[i] = static_cast<const T*>(problem.weight) + (first_output + row) * problem.weight_stride + k;
      }
      transpose_strip(rows, depth, scratch.strip);
      for_row_groups<kPanelRows>(tokens, [&](int t, auto count) {
        multiply_panel<decltype(count)::value>(part + t * kLinearDepth, scratch.strip, depth, k == 0,
                                               scratch.sums + t * kLinearOutputs + column);
      });
    }
  }
  write_outputs<T>(problem, first_token, tokens, first_output, first_output + outputs, scratch.sums, kLinearOutputs);
}

size_t arranged_floats(const fa_linear& problem) {
  const size_t tokens = static_cast<size_t>(problem.num_tokens);
  return tokens * static_cast<size_t>(problem.num_tokens <= kFewTokens ? round_up(problem.in_features, kLinearStep)
                                                                       : round_up(problem.in_features, kLinearDepth));
}

// The functions of LinearKernels, for the problem's dtype.
void arrange(const fa_linear& problem, float* to, int64_t begin, int64_t end) {
  with_dtype(problem.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (problem.num_tokens <= kFewTokens) {
      arrange_few<T>(problem, to);
    } else {
      arrange_many<T>(problem, to, begin, end);
    }
  });
}
void multiply_few(const fa_linear& problem, const float* x, int begin, int end) {
  with_dtype(problem.dtype,
             [&](auto* type) { linear_few<std::remove_pointer_t<decltype(type)>>(problem, x, begin, end); });
}
void multiply_many(const fa_linear& problem, const float* x, int64_t first_token, int first_output, void* scratch) {
  with_dtype(problem.dtype, [&](auto* type) {
    linear_many<std::remove_pointer_t<decltype(type)>>(problem, x, first_token, first_output, scratch);
  });
}

constexpr LinearKernels kLinear = {
    kFewTokens, kLinearOutputs, sizeof(LinearScratch), arranged_floats, arrange, multiply_few, multiply_many,
};

}  // namespace
}  // namespace fastattention
