// One item of the gated delta rule, from the layer's projected inputs to its output and state.
namespace fastattention {
namespace {

// The key head's n normalised keys of the tokens [first, first + n) of the request, and then its queries.
inline void load_keys_and_queries(const fa_gated_delta& problem, const DeltaItem& item, int first, int n,
                                  const DeltaScratch& scratch) {
  const int size = problem.key_size, stride = scratch.key_stride;
  const int channel = item.first_head / (problem.value_heads / problem.key_heads) * size;
  float* queries = scratch.rows + n * stride;
  convolve(problem, item.request, problem.key_heads * size + channel, size, first, n, scratch.rows, stride);
  convolve(problem, item.request, channel, size, first, n, queries, stride);
  normalise(scratch.rows, stride, n, size, 1.0f);
  normalise(queries, stride, n, size, 1.0f / __builtin_sqrtf(static_cast<float>(size)));
}

inline void load_values(const fa_gated_delta& problem, int request, int head, int first, int n,
                        const DeltaScratch& scratch) {
  const int channel = 2 * problem.key_heads * problem.key_size + head * problem.value_size;
  convolve(problem, request, channel, problem.value_size, first, n, scratch.values, scratch.value_stride);
}

// n rows of size numbers to the columns from column on of the output of a head.
inline void write_output(const fa_gated_delta& problem, int64_t row, int head, int column, int size, int n,
                         const float* from, int from_stride) {
  with_dtype(problem.dtype, [&](auto* type) {
    auto* out = static_cast<decltype(type)>(problem.out) + row * problem.out_token_stride +
                static_cast<int64_t>(head) * problem.value_size + column;
    for (int t = 0; t < n; ++t) {
      for_each_vector(size, [&](int d, auto part) {
        part.write(out + t * problem.out_token_stride + d, part.read(from + static_cast<size_t>(t) * from_stride + d));
      });
    }
  });
}

// Where a request's states of the item's first head are: before its tokens, and after each.
template <class S>
struct TokenStates {
  const fa_gated_delta& problem;
  S* states;
  int request;
  int verified;

  TokenStates(const fa_gated_delta& p, const DeltaItem& item, S* all)
      : problem(p),
        states(all + static_cast<int64_t>(item.first_head) * p.key_size * p.value_size),
        request(item.request),
        verified(verified_tokens(p, item.request)) {}
  S* before() const { return verified > 0 ? after(verified - 1) : in(problem.slots[request]); }
  S* after(int token) const {
    if (verified == 0) return in(problem.slots[request]);
    return in(problem.state_slots[static_cast<int64_t>(request) * problem.states_per_request + token]);
  }
  S* in(int32_t slot) const { return states + slot * problem.states_slot_stride; }
};

// Few tokens, each of which has a state of its own.
template <class S>
void delta_token_by_token(const fa_gated_delta& problem, const DeltaItem& item, const DeltaScratch& scratch,
                          const TokenStates<S>& states) {
  const int64_t begin = problem.query_start_loc[item.request];
  const int tokens = static_cast<int>(problem.query_start_loc[item.request + 1] - begin);
  const int64_t state_size = static_cast<int64_t>(problem.key_size) * problem.value_size;
  DeltaToken token;
  for (int first = 0; first < tokens; first += kChunk) {
    const int n = tokens - first < kChunk ? tokens - first : kChunk;
    load_keys_and_queries(problem, item, first, n, scratch);
    const S* start = first > 0 ? states.after(first - 1) : states.before();
    for (int h = 0; h < item.num_heads; ++h) {
      const int head = item.first_head + h;
      load_values(problem, item.request, head, first, n, scratch);
      const S* before = start + h * state_size;
      for (int t = 0; t < n; ++t) {
        const float* value = scratch.values + t * scratch.value_stride;
        S* after = states.after(first + t) + h * state_size;
        token.key = scratch.rows + t * scratch.key_stride;
        token.query = scratch.rows + (n + t) * scratch.key_stride;
        token.begun = first + t > 0 || problem.begun[item.request] != 0;
        Vec match = splat(0.0f);
        for (int d = 0; d < problem.key_size; d += kWidth) {
          match = fma(load(token.key + d), load(token.query + d), match);
        }
        token.match = reduce_add(match);
        gates_of_token(problem, head, begin + first + t, &token.decay, &token.beta);
        token.decay = exp2(token.decay);
        const S* next = t + 1 == n && h + 1 < item.num_heads ? start + (h + 1) * state_size : nullptr;
        update_state<kStateVectors>(token, problem.key_size, problem.value_size, 0, before, after, next, value,
                                    scratch.strip);
        write_output(problem, begin + first + t, head, 0, problem.value_size, 1, scratch.strip, 0);
        before = after;
      }
    }
  }
}

template <class S>
void delta_of_tokens(const fa_gated_delta& problem, const DeltaItem& item, const DeltaScratch& scratch, S* states) {
  const int64_t begin = problem.query_start_loc[item.request];
  const int tokens = static_cast<int>(problem.query_start_loc[item.request + 1] - begin);
  const int key_size = problem.key_size, value_size = problem.value_size;
  const size_t state_size = static_cast<size_t>(key_size) * value_size;
  for (int h = 0; h < item.num_heads; ++h) {
    float* strips = scratch.states + h * scratch.state_floats;
    if (problem.begun[item.request] == 0 || value_size < scratch.value_stride) {
      __builtin_memset(strips, 0, scratch.state_floats * sizeof(float));
    }
    if (problem.begun[item.request] != 0) {
      load_state(states + h * state_size, key_size, value_size, scratch.value_stride, strips);
    }
  }
  for (int first = 0; first < tokens; first += kChunk) {
    const int n = tokens - first < kChunk ? tokens - first : kChunk;
    load_keys_and_queries(problem, item, first, n, scratch);
    products_of_chunk(key_size, n, scratch);
    for (int h = 0; h < item.num_heads; ++h) {
      const int head = item.first_head + h;
      load_values(problem, item.request, head, first, n, scratch);
      gates_of_chunk(problem, head, begin + first, n, scratch);
      weigh_products(n, scratch);
      float* strips = scratch.states + h * scratch.state_floats;
      for_strips(0, scratch.value_stride, [&](int column, auto vectors, int width) {
        constexpr int N = decltype(vectors)::value;
        chunk_strip<N>(key_size, n, scratch, scratch.values + column, strips + static_cast<size_t>(column) * key_size);
        write_output(problem, begin + first, head, column, value_size - column < width ? value_size - column : width, n,
                     scratch.strip + n * width, width);
      });
    }
  }
  for (int h = 0; h < item.num_heads; ++h) {
    store_state(scratch.states + h * scratch.state_floats, key_size, value_size, scratch.value_stride,
                states + h * state_size);
  }
}

void gated_delta(const fa_gated_delta& problem, const DeltaItem& item, void* memory) {
  const DeltaScratch scratch(memory, problem, item.num_heads);
  with_dtype(problem.states_dtype, [&](auto* type) {
    const TokenStates states(problem, item, static_cast<decltype(type)>(problem.states));
    if (states.verified > 0 || problem.query_start_loc[item.request + 1] - problem.query_start_loc[item.request] == 1) {
      delta_token_by_token(problem, item, scratch, states);
    } else {
      delta_of_tokens(problem, item, scratch, states.before());
    }
  });
}

}  // namespace
}  // namespace fastattention
