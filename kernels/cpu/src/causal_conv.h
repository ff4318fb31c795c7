// The causal convolution of each channel with its own filter, and the inputs that it keeps for the next step.
namespace fastattention {
namespace {

// x / (1 + e^-x). Below -87, where e^-x overflows, the result is smaller than the smallest normal number.
inline Vec silu(Vec x) {
  const Vec power = exp2(mul(max(x, splat(-87.0f)), splat(-kLog2E)));
  return select_less(x, splat(-87.0f), splat(0.0f), div(x, add(splat(1.0f), power)));
}

// Up to kWidth numbers that are stride apart.
template <class T, class Part>
inline Vec read_strided(const T* p, int64_t stride, int count, Part part) {
  if (stride == 1) return part.read(p);
  T lanes[kWidth] = {};
  for (int i = 0; i < count; ++i) lanes[i] = p[i * stride];
  return part.read(lanes);
}
template <class T, class Part>
inline void write_strided(T* p, int64_t stride, int count, Vec a, Part part) {
  if (stride == 1) return part.write(p, a);
  T lanes[kWidth];
  part.write(lanes, a);
  for (int i = 0; i < count; ++i) p[i * stride] = lanes[i];
}

// How many tokens of the request's last step were accepted, if it computes draft tokens; otherwise 0.
inline int verified_tokens(const fa_gated_delta& problem, int request) {
  return problem.verified != nullptr ? problem.verified[request] : 0;
}

// The row of a slot's inputs with which a request begins.
inline int first_input(const fa_gated_delta& problem, int request) {
  const int verified = verified_tokens(problem, request);
  return verified > 0 ? verified - 1 : 0;
}

// The W - 1 inputs before a step, of the channels from channel on: N vectors, oldest first.
template <int W, int N, class Part>
inline void load_kept(const fa_gated_delta& problem, int request, int channel, int count, Part part,
                      Vec (&window)[N][W]) {
  with_dtype(problem.inputs_dtype, [&](auto* type) {
    const int64_t stride = problem.inputs_channel_stride;
    const auto* kept = static_cast<decltype(type)>(problem.inputs) +
                       problem.slots[request] * problem.inputs_slot_stride +
                       first_input(problem, request) * problem.inputs_token_stride + channel * stride;
    FA_UNROLL
    for (int n = 0; n < N; ++n) {
      FA_UNROLL
      for (int j = 0; j < W - 1; ++j) {
        window[n][j] = read_strided(kept + j * problem.inputs_token_stride + n * kWidth * stride, stride,
                                    count < kWidth ? count : kWidth, part);
      }
    }
  });
}

// N vectors of channels, for the count tokens from first on of a request; x is the first one's row.
template <int W, int N, class Pointer, class Part>
inline void convolve_columns(const fa_gated_delta& problem, int request, int channel, int lanes, int first, int count,
                             Pointer x, float* out, int out_stride, Part part) {
  // Tokens are far apart, so the hardware does not prefetch them.
  constexpr int kAhead = 8;
  const int64_t channels = delta_channels(problem), stride = problem.x_token_stride;
  Vec filter[W][N], window[N][W], bias[N];
  FA_UNROLL
  for (int n = 0; n < N; ++n) {
    FA_UNROLL
    for (int j = 0; j < W; ++j) filter[j][n] = part.read(problem.weight + j * channels + channel + n * kWidth);
    bias[n] = problem.bias != nullptr ? part.read(problem.bias + channel + n * kWidth) : splat(0.0f);
    FA_UNROLL
    for (int j = 0; j < W - 1; ++j) {
      window[n][j] = first > 0 ? part.read(x + (j - W + 1) * stride + n * kWidth) : splat(0.0f);
    }
  }
  if (first == 0 && problem.begun[request] != 0) load_kept<W, N>(problem, request, channel, lanes, part, window);
  const bool active = problem.silu != 0;
  for (int t = 0; t < count; ++t) {
    if (t + kAhead < count) __builtin_prefetch(x + (t + kAhead) * stride);
    FA_UNROLL
    for (int n = 0; n < N; ++n) {
      window[n][W - 1] = part.read(x + t * stride + n * kWidth);
      Vec sum = bias[n];
      FA_UNROLL
      for (int j = 0; j < W; ++j) sum = fma(filter[j][n], window[n][j], sum);
      FA_UNROLL
      for (int j = 0; j < W - 1; ++j) window[n][j] = window[n][j + 1];
      store(out + static_cast<size_t>(t) * out_stride + n * kWidth, active ? silu(sum) : sum);
    }
  }
}

// The channels [channel, channel + size) of the tokens [first, first + count) of a request, to rows of whole vectors;
// lanes past the end are zero. first is 0 or at least W - 1. Two vectors of 16-bit inputs are a cache line.
template <int W, class Pointer>
void convolve_width(const fa_gated_delta& problem, int request, int channel, int size, int first, int count, float* out,
                    int out_stride) {
  const Pointer x = static_cast<Pointer>(const_cast<void*>(problem.x)) +
                    (problem.query_start_loc[request] + first) * problem.x_token_stride + channel;
  int d = 0;
  for (; d + 2 * kWidth <= size; d += 2 * kWidth) {
    convolve_columns<W, 2>(problem, request, channel + d, size - d, first, count, x + d, out + d, out_stride,
                           WholeVector());
  }
  for_each_vector(size - d, [&](int rest, auto part) {
    convolve_columns<W, 1>(problem, request, channel + d + rest, size - d - rest, first, count, x + d + rest,
                           out + d + rest, out_stride, part);
  });
}

void convolve(const fa_gated_delta& problem, int request, int channel, int size, int first, int count, float* out,
              int out_stride) {
  with_dtype(problem.dtype, [&](auto* type) {
    const auto run = problem.width == 2   ? convolve_width<2, decltype(type)>
                     : problem.width == 3 ? convolve_width<3, decltype(type)>
                                          : convolve_width<4, decltype(type)>;
    run(problem, request, channel, size, first, count, out, out_stride);
  });
}

// Rows of inputs after a step of count tokens: each is `shift` inputs newer than before. After draft tokens, there is
// one history of width - 1 inputs behind each token.
struct KeptRows {
  int count;
  int shift;
  int first;  // old row of the oldest input

  KeptRows(const fa_gated_delta& problem, int request, int tokens)
      : count(problem.width - 1), shift(tokens), first(first_input(problem, request)) {
    if (verified_tokens(problem, request) == 0) return;
    count += tokens - 1;
    shift = 1;
  }
  // The token whose input row j gets; negative: the old row old_row(j).
  int token(int j, int width) const { return j + shift - (width - 1); }
  int64_t old_row(int j) const { return first + j + shift; }
};

// keep_inputs() where no number changes.
inline void copy_kept(const fa_gated_delta& problem, int request, int channel_begin, int channel_end) {
  const int64_t begin = problem.query_start_loc[request];
  const KeptRows rows(problem, request, static_cast<int>(problem.query_start_loc[request + 1] - begin));
  const size_t size = problem.dtype == FA_F32 ? sizeof(float) : sizeof(BFloat16);
  const size_t bytes = static_cast<size_t>(channel_end - channel_begin) * size;
  const char* x = static_cast<const char*>(problem.x) +
                  (begin * problem.x_token_stride + channel_begin) * static_cast<int64_t>(size);
  char* inputs = static_cast<char*>(problem.inputs) +
                 (problem.slots[request] * problem.inputs_slot_stride + channel_begin) * static_cast<int64_t>(size);
  // With few tokens, older inputs move up. Each row is read before it is overwritten.
  for (int j = 0; j < rows.count; ++j) {
    const int token = rows.token(j, problem.width);
    char* row = inputs + j * problem.inputs_token_stride * static_cast<int64_t>(size);
    if (token >= 0) {
      __builtin_memcpy(row, x + token * problem.x_token_stride * static_cast<int64_t>(size), bytes);
    } else if (problem.begun[request] != 0) {
      __builtin_memcpy(row, inputs + rows.old_row(j) * problem.inputs_token_stride * static_cast<int64_t>(size), bytes);
    } else {
      __builtin_memset(row, 0, bytes);
    }
  }
}

void keep_inputs(const fa_gated_delta& problem, int request, int channel_begin, int channel_end) {
  const int64_t begin = problem.query_start_loc[request];
  const KeptRows rows(problem, request, static_cast<int>(problem.query_start_loc[request + 1] - begin));
  const int64_t slot = problem.slots[request] * problem.inputs_slot_stride;
  const int64_t stride = problem.inputs_channel_stride;
  if (problem.dtype == problem.inputs_dtype && stride == 1) {
    return copy_kept(problem, request, channel_begin, channel_end);
  }
  with_dtype(problem.dtype, [&](auto* from) {
    const auto* x = static_cast<decltype(from)>(const_cast<void*>(problem.x)) + begin * problem.x_token_stride;
    with_dtype(problem.inputs_dtype, [&](auto* to) {
      auto* inputs = static_cast<decltype(to)>(problem.inputs) + slot;
      for_each_vector(channel_end - channel_begin, [&](int d, auto part) {
        const int channel = channel_begin + d;
        const int lanes = channel_end - channel < kWidth ? channel_end - channel : kWidth;
        for (int j = 0; j < rows.count; ++j) {
          const int token = rows.token(j, problem.width);
          Vec row = splat(0.0f);
          if (token >= 0) {
            row = part.read(x + token * problem.x_token_stride + channel);
          } else if (problem.begun[request] != 0) {
            row = read_strided(inputs + rows.old_row(j) * problem.inputs_token_stride + channel * stride, stride, lanes,
                               part);
          }
          write_strided(inputs + j * problem.inputs_token_stride + channel * stride, stride, lanes, row, part);
        }
      });
    });
  });
}

}  // namespace
}  // namespace fastattention
