// One work item from queries to output: the two-level tiling. Compiled once per instruction set.
//
// First level: the item's query rows (kRowBlock of them, the heads of a GQA group packed into rows) against the KV
// stream in tiles of kKvBlock tokens, so K and V are read from memory once per KV head.
// Second level: panels of a few rows, whose scores of one tile are computed, turned into weights and multiplied with V
// while they sit in the L1 cache, and whose products are formed in register tiles.
namespace fastattention {
namespace {

// Direct panels convert K and V anew for every 4 rows; from here on unpacking once is cheaper.
constexpr int kMaxDirectRows = 16;

struct Scratch {
  float* query;    // [rows][stride], scaled
  float* output;   // [rows][stride], unnormalised
  float* maximum;  // [rows]
  float* sum;      // [rows]
  float* scores;   // [kPanelRows][kKvBlock]
  float* keys;     // [stride][kKvBlock]
  float* values;   // [kKvBlock][stride]
  size_t floats;

  Scratch(void* memory, int rows, int head_size) : floats(0) {
    const size_t stride = round_up(head_size, kWidth);
    const auto take = [&](size_t count) {
      float* part = memory != nullptr ? static_cast<float*>(memory) + floats : nullptr;
      floats += (count + 15) / 16 * 16;  // every part starts on a cache line
      return part;
    };
    query = take(rows * stride);
    output = take(rows * stride);
    maximum = take(rows);
    sum = take(rows);
    scores = take(8 * kKvBlock);
    keys = take(stride * kKvBlock);
    values = take(kKvBlock * stride);
  }
};

size_t scratch_bytes(int rows, int head_size) { return Scratch(nullptr, rows, head_size).floats * sizeof(float); }

// Calls f(offset of the row in token and head, row) for every row of the item.
template <class F>
inline void for_each_row(const fa_attention_problem& problem, const WorkItem& item, F f) {
  const int group = problem.num_heads / problem.num_kv_heads;
  const int64_t first = problem.query_start_loc[item.seq] + static_cast<int64_t>(item.first_token);
  int row = 0;
  for (int t = 0; t < item.num_tokens; ++t) {
    for (int g = 0; g < group; ++g) f(first + t, item.kv_head * group + g, row++);
  }
}

template <class T>
void load_query(const T* from, int head_size, float scale, float* to) {
  const Vec factor = splat(scale);
  for_each_vector(head_size, [&](int d, auto part) { store(to + d, mul(part.read(from + d), factor)); });
}

template <class T>
void store_output(const float* from, int head_size, float factor, T* to) {
  const Vec f = splat(factor);
  for_each_vector(head_size, [&](int d, auto part) { part.write(to + d, mul(part.read(from + d), f)); });
}

// Calls f with a null pointer of the element type, to choose a template at run time.
template <class F>
inline void with_dtype(int32_t dtype, F f) {
  switch (dtype) {
    case FA_F32:
      return f(static_cast<float*>(nullptr));
    case FA_F16:
      return f(static_cast<Half*>(nullptr));
    default:
      return f(static_cast<BFloat16*>(nullptr));
  }
}
// The same with what only K and V may be.
template <class F>
inline void with_kv_dtype(int32_t dtype, F f) {
  switch (dtype) {
    case FA_F8_E4M3:
      return f(static_cast<Float8E4M3*>(nullptr));
    case FA_F8_E5M2:
      return f(static_cast<Float8E5M2*>(nullptr));
    default:
      return with_dtype(dtype, f);
  }
}

void load_queries(const fa_attention_problem& problem, const WorkItem& item, int stride, float* query) {
  with_dtype(problem.dtype, [&](auto* type) {
    const auto* base = static_cast<decltype(type)>(const_cast<void*>(problem.query));
    for_each_row(problem, item, [&](int64_t token, int64_t head, int row) {
      load_query(base + token * problem.query_token_stride + head * problem.query_head_stride, problem.head_size,
                 problem.scale * problem.key_scale, query + static_cast<size_t>(row) * stride);
    });
  });
}

// Normalises a row once everything it sees is summed up: the one place, and the one time, that its sink is counted.
void finish_row(const fa_attention_problem& problem, int64_t token, int64_t head, const float* output, float maximum,
                float sum) {
  float weight = 1.0f;
  if (problem.sinks != nullptr) weight = add_sink(problem.sinks[head], maximum, sum);
  const bool saw_nothing = sum == 0.0f;
  with_dtype(problem.dtype, [&](auto* type) {
    auto* out =
        static_cast<decltype(type)>(problem.out) + token * problem.out_token_stride + head * problem.out_head_stride;
    store_output(output, problem.head_size, saw_nothing ? 0.0f : weight / sum * problem.value_scale, out);
  });
  if (problem.lse != nullptr) {
    problem.lse[token * problem.lse_token_stride + head * problem.lse_head_stride] =
        saw_nothing ? -kInfinity : maximum + __builtin_logf(sum);
  }
}

template <class T, class Panels>
void attend_tiles(const fa_attention_problem& problem, const WorkItem& item, int num_rows, const Scratch& scratch,
                  Panels panels) {
  const int head_size = problem.head_size;
  const int stride = round_up(head_size, kWidth);
  const int group = problem.num_heads / problem.num_kv_heads;
  const Visibility visible = visibility(problem, item.seq);
  const float* slopes = problem.alibi_slopes;
  if (slopes != nullptr) slopes += item.seq * problem.alibi_seq_stride + item.kv_head * group;

  KvRows<T> row_sets[2];
  KvRows<T>* rows = &row_sets[0];
  KvRows<T>* upcoming = &row_sets[1];
  const auto tile_size = [&](int64_t first) {
    return item.kv_end - first < kKvBlock ? static_cast<int>(item.kv_end - first) : kKvBlock;
  };
  if (item.kv_begin < item.kv_end) locate(problem, item, item.kv_begin, tile_size(item.kv_begin), *rows);

  for (int64_t tile = item.kv_begin; tile < item.kv_end; tile += kKvBlock) {
    const int64_t next = tile + kKvBlock;
    if (next < item.kv_end) locate(problem, item, next, tile_size(next), *upcoming);
    panels.prepare(*rows, next < item.kv_end ? upcoming : nullptr, head_size, stride);
    const auto column = [&](int64_t position) {
      const int64_t c = position - tile;
      return c < 0 ? 0 : c > rows->count ? rows->count : static_cast<int>(c);
    };

    for (int first_row = 0; first_row < num_rows; first_row += Panels::kRows) {
      const int panel_rows = num_rows - first_row < Panels::kRows ? num_rows - first_row : Panels::kRows;
      const int64_t first_token = item.first_token + first_row / group;
      const int64_t last_token = item.first_token + (first_row + panel_rows - 1) / group;
      // The union of what the panel's rows see; both ends only grow with the token.
      const int begin = column(visible.begin(first_token));
      const int end = column(visible.end(last_token));
      if (begin >= end) continue;
      const int vector_begin = begin / kWidth * kWidth;
      const int vector_end = round_up(end, kWidth);
      // Every row sees every column that is computed: no mask code at all.
      const bool boundary =
          column(visible.begin(last_token)) > vector_begin || column(visible.end(first_token)) < vector_end;

      panels.scores(panel_rows, scratch.query + static_cast<size_t>(first_row) * stride, stride, head_size,
                    vector_begin, vector_end, scratch.scores);
      float rescale[Panels::kRows];
      for (int r = 0; r < panel_rows; ++r) {
        const int row = first_row + r;
        const int64_t token = item.first_token + row / group;
        float* scores = scratch.scores + r * kKvBlock;
        if (problem.softcap > 0.0f) apply_softcap(scores, vector_begin, vector_end, problem.softcap);
        if (slopes != nullptr) {
          apply_alibi(scores, vector_begin, vector_end, slopes[row % group],
                      static_cast<float>(visible.offset + token - tile));
        }
        rescale[r] = softmax_row(scores, vector_begin, vector_end, boundary, column(visible.begin(token)),
                                 column(visible.end(token)), scratch.maximum[row], scratch.sum[row]);
      }
      // Exactly the visible columns: V rows that no row of the panel sees are not even multiplied by zero, since
      // zero times a NaN in an unwritten page would be NaN.
      panels.add_values(panel_rows, scratch.scores, stride, head_size, begin, end, rescale,
                        scratch.output + static_cast<size_t>(first_row) * stride);
    }
    KvRows<T>* done = rows;
    rows = upcoming;
    upcoming = done;
  }
}

template <class T>
void attend_kv(const fa_attention_problem& problem, const WorkItem& item, int num_rows, const Scratch& scratch, T*) {
  if (num_rows <= kMaxDirectRows) {
    attend_tiles<T>(problem, item, num_rows, scratch, DirectPanels<T>{});
  } else {
    attend_tiles<T>(problem, item, num_rows, scratch, PackedPanels<T>{scratch.keys, scratch.values});
  }
}

void attend(const fa_attention_problem& problem, const WorkItem& item, void* memory) {
  const int head_size = problem.head_size;
  const int stride = round_up(head_size, kWidth);
  const int num_rows = item.num_tokens * (problem.num_heads / problem.num_kv_heads);
  const Scratch scratch(memory, num_rows, head_size);

  load_queries(problem, item, stride, scratch.query);
  __builtin_memset(scratch.output, 0, sizeof(float) * num_rows * stride);
  for (int r = 0; r < num_rows; ++r) {
    scratch.maximum[r] = -kInfinity;
    scratch.sum[r] = 0.0f;
  }
  with_kv_dtype(problem.kv_dtype, [&](auto* type) { attend_kv(problem, item, num_rows, scratch, type); });

  if (item.partial == nullptr) {
    for_each_row(problem, item, [&](int64_t token, int64_t head, int row) {
      finish_row(problem, token, head, scratch.output + static_cast<size_t>(row) * stride, scratch.maximum[row],
                 scratch.sum[row]);
    });
    return;
  }
  for (int r = 0; r < num_rows; ++r) {
    store_output(scratch.output + static_cast<size_t>(r) * stride, head_size, 1.0f,
                 item.partial + static_cast<size_t>(r) * head_size);
  }
  float* maximum = item.partial + static_cast<size_t>(num_rows) * head_size;
  __builtin_memcpy(maximum, scratch.maximum, sizeof(float) * num_rows);
  __builtin_memcpy(maximum + num_rows, scratch.sum, sizeof(float) * num_rows);
}

// Log-sum-exp merge, always in KV order: the result does not depend on which thread finished when.
void merge(const fa_attention_problem& problem, const WorkItem& item, int num_splits) {
  const int head_size = problem.head_size;
  const int num_rows = item.num_tokens * (problem.num_heads / problem.num_kv_heads);
  const size_t partial_size = partial_floats(num_rows, head_size);
  for_each_row(problem, item, [&](int64_t token, int64_t head, int row) {
    const float* row_output = item.partial + static_cast<size_t>(row) * head_size;
    const float* row_maximum = item.partial + static_cast<size_t>(num_rows) * head_size + row;
    float maximum = -kInfinity;
    for (int i = 0; i < num_splits; ++i) {
      const float m = row_maximum[i * partial_size];
      maximum = m > maximum ? m : maximum;
    }
    const float shift = maximum == -kInfinity ? 0.0f : maximum;
    float weight[kMaxSplits];
    float sum = 0.0f;
    for (int i = 0; i < num_splits; ++i) {
      weight[i] = exp_nonpositive(row_maximum[i * partial_size] - shift);
      sum += weight[i] * row_maximum[i * partial_size + num_rows];
    }
    alignas(64) float merged[kMaxHeadSize];
    for_each_vector(head_size, [&](int d, auto part) {
      Vec total = splat(0.0f);
      for (int i = 0; i < num_splits; ++i) {
        total = fma(splat(weight[i]), part.read(row_output + i * partial_size + d), total);
      }
      store(merged + d, total);
    });
    finish_row(problem, token, head, merged, maximum, sum);
  });
}

}  // namespace
}  // namespace fastattention
