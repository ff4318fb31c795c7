// Computes one work item, from queries to output, with two-level tiling. Compiled once per instruction set.
//
// First level: the item's query rows, with the heads of a GQA group packed into rows, meet the KV stream in tiles of up
// to kKvTile tokens. K and V are read from memory once per KV head.
// Second level: panels of a few rows. While a tile is in the cache, a panel's scores are computed in register tiles,
// turned into weights and multiplied with V.
namespace fastattention {
namespace {

// Calls f(token, head, row) for every row of the item. token counts from the first row of query, row from the item's
// first.
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
void store_output(const float* from, int head_size, float factor, T* to) {
  const Vec f = splat(factor);
  for_each_vector(head_size, [&](int d, auto part) { part.write(to + d, mul(part.read(from + d), f)); });
}

// Calls f with a null pointer of the element type, which selects a template at run time.
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
// The same for K and V, which may also have 8 bits.
template <class F>
inline void with_kv_dtype(int32_t dtype, F f) {
  switch (dtype) {
    case FA_F8_E4M3:
      return f(static_cast<Float8E4M3*>(nullptr));
    case FA_F8_E5M2:
      return f(static_cast<Float8E5M2*>(nullptr));
    case FA_I8:
      return f(static_cast<Int8*>(nullptr));
    default:
      return with_dtype(dtype, f);
  }
}

// Load the item's query rows in the panels' element type. fp32: the scale and the change to base 2 are multiplied in.
inline void load_queries(const fa_attention_problem& problem, const WorkItem& item, int stride, float* query) {
  const Vec factor = splat(problem.scale * problem.key_scale * kLog2E);
  with_dtype(problem.dtype, [&](auto* type) {
    const auto* base = static_cast<decltype(type)>(const_cast<void*>(problem.query));
    for_each_row(problem, item, [&](int64_t token, int64_t head, int row) {
      const auto* from = base + token * problem.query_token_stride + head * problem.query_head_stride;
      float* to = query + static_cast<size_t>(row) * stride;
      for_each_vector(problem.head_size, [&](int d, auto part) { store(to + d, mul(part.read(from + d), factor)); });
    });
  });
}
inline float score_factor(const fa_attention_problem&, const float*) { return 1.0f; }

// bf16: unscaled and exact, because rounding a scaled query would lose precision. Padded with zeros.
inline void load_queries(const fa_attention_problem& problem, const WorkItem& item, int stride, BFloat16* query) {
  const BFloat16* base = static_cast<const BFloat16*>(problem.query);
  __builtin_memset(
      query, 0,
      sizeof(BFloat16) * round_up(item.num_tokens * (problem.num_heads / problem.num_kv_heads), kPadding) * stride);
  for_each_row(problem, item, [&](int64_t token, int64_t head, int row) {
    __builtin_memcpy(query + static_cast<size_t>(row) * stride,
                     base + token * problem.query_token_stride + head * problem.query_head_stride,
                     sizeof(BFloat16) * problem.head_size);
  });
}
inline float score_factor(const fa_attention_problem& problem, const BFloat16*) {
  return problem.scale * problem.key_scale * kLog2E;
}

#if defined(FA_AMX)
// fp16 as two parts of bf16: unscaled for the same reason.
inline void load_queries(const fa_attention_problem& problem, const WorkItem& item, int stride, SplitNumber* query) {
  const Half* base = static_cast<const Half*>(problem.query);
  __builtin_memset(
      query, 0,
      sizeof(SplitNumber) * round_up(item.num_tokens * (problem.num_heads / problem.num_kv_heads), kPadding) * stride);
  for_each_row(problem, item, [&](int64_t token, int64_t head, int row) {
    const Half* from = base + token * problem.query_token_stride + head * problem.query_head_stride;
    SplitNumber* to = query + static_cast<size_t>(row) * stride;
    for (int d = 0; d < problem.head_size; d += kSplitStep) {
      const SplitPairs pairs = load_split(from + d, problem.head_size - d);
      _mm512_storeu_si512(to + d, pairs.upper);
      _mm512_storeu_si512(to + d + kWidth, pairs.lower);
    }
  });
}
inline float score_factor(const fa_attention_problem& problem, const SplitNumber*) {
  return score_factor(problem, static_cast<const BFloat16*>(nullptr));
}
#endif

// Normalises a row after all its keys are summed. The row's sink is counted here, and nowhere else.
void finish_row(const fa_attention_problem& problem, int64_t token, int64_t head, const float* output, float reference,
                float sum) {
  const bool saw_nothing = sum == 0.0f;  // no key except the sink, which every row sees
  float weight = saw_nothing ? 0.0f : 1.0f;
  if (problem.sinks != nullptr) weight *= add_sink(problem.sinks[head] * kLog2E, reference, sum);
  with_dtype(problem.dtype, [&](auto* type) {
    auto* out =
        static_cast<decltype(type)>(problem.out) + token * problem.out_token_stride + head * problem.out_head_stride;
    store_output(output, problem.head_size, sum == 0.0f ? 0.0f : weight / sum * problem.value_scale, out);
  });
  if (problem.lse == nullptr) return;
  float& lse = problem.lse[token * problem.lse_token_stride + head * problem.lse_head_stride];
  if (!saw_nothing) {
    lse = reference * kLn2 + __builtin_logf(sum);
  } else {
    lse = problem.sinks != nullptr ? problem.sinks[head] : -kInfinity;
  }
}

// The first row of a panel, or for panel == num_panels the number of rows. Even panels differ by one row at most: the
// sums of a few rows left over would wait for themselves.
template <class Panels>
int panel_begin(int num_rows, int panel, int num_panels) {
  if (Panels::kEven) return num_rows * panel / num_panels;
  return panel < num_panels ? panel * Panels::kRows : num_rows;
}

template <class T, class Panels>
void attend_tiles(const fa_attention_problem& problem, const WorkItem& item, const WorkItem* following, int num_rows,
                  const Scratch& scratch) {
  using Weight = typename Panels::Weight;
  const int group = problem.num_heads / problem.num_kv_heads;
  const Visibility visible = visibility(problem, item.seq);
  const float* slopes = problem.alibi_slopes;
  if (slopes != nullptr) slopes += item.seq * problem.alibi_seq_stride + item.kv_head * group;
  const float factor = score_factor(problem, static_cast<const typename Panels::Element*>(nullptr));
  const int tile_tokens = Panels::tile_tokens(num_rows);
  const bool adjusted = problem.softcap > 0.0f || slopes != nullptr;

  Panels panels{scratch, problem.head_size};
  panels.arrange_queries(num_rows);
  KvRows<T> row_sets[2];
  KvRows<T>* rows = &row_sets[0];
  KvRows<T>* upcoming = &row_sets[1];
  const auto locate_tile = [&](const WorkItem& of, int64_t first, KvRows<T>& to) {
    if (first >= of.kv_end) return false;
    locate(problem, of, first, of.kv_end - first < tile_tokens ? static_cast<int>(of.kv_end - first) : tile_tokens, to);
    return true;
  };
  locate_tile(item, item.kv_begin, *rows);

  for (int64_t tile = item.kv_begin; tile < item.kv_end; tile += tile_tokens) {
    const bool more = locate_tile(item, tile + tile_tokens, *upcoming) ||
                      (following != nullptr && locate_tile(*following, following->kv_begin, *upcoming));
    panels.prepare(*rows, more ? upcoming : nullptr, num_rows);
    const RowFactors<T> row_factors(*rows);
    const auto column = [&](int64_t position) {
      const int64_t c = position - tile;
      return c < 0 ? 0 : c > rows->count ? rows->count : static_cast<int>(c);
    };

    const int num_panels = (num_rows + Panels::kRows - 1) / Panels::kRows;
    for (int panel = 0; panel < num_panels; ++panel) {
      const int first_row = panel_begin<Panels>(num_rows, panel, num_panels);
      const int panel_rows = panel_begin<Panels>(num_rows, panel + 1, num_panels) - first_row;
      const int64_t first_token = item.first_token + first_row / group;
      const int64_t last_token = item.first_token + (first_row + panel_rows - 1) / group;
      // The union of what the panel's rows see. Both ends grow with the token.
      const int begin = column(visible.begin(first_token));
      const int end = column(visible.end(last_token));
      if (begin >= end) continue;
      const int step_begin = begin / kColumnStep * kColumnStep;
      const int step_end = round_up(end, kColumnStep);
      // False if every row sees every computed column, which then needs no mask.
      const bool boundary =
          column(visible.begin(last_token)) > step_begin || column(visible.end(first_token)) < step_end;

      panels.scores(first_row, panel_rows, step_begin, step_end, scratch.scores);
      row_factors.multiply_scores(scratch.scores, panel_rows, step_begin, step_end);
      // Weights overwrite the scores of this row and the rows before it. They are never wider than scores.
      Weight* weights = reinterpret_cast<Weight*>(scratch.scores);
      static_assert(sizeof(Weight) <= sizeof(float), "weights overwrite scores");
      float rescale[Panels::kRows];
      int64_t token = first_token;
      int head = first_row % group;
      for (int r = 0; r < panel_rows; ++r, ++head) {
        const int row = first_row + r;
        if (head == group) {
          head = 0;
          ++token;
        }
        float* scores = scratch.scores + r * kKvTile;
        if (adjusted) {
          if (factor != 1.0f) multiply_scores(scores, step_begin, step_end, factor);
          if (problem.softcap > 0.0f) apply_softcap(scores, step_begin, step_end, problem.softcap * kLog2E);
          if (slopes != nullptr) {
            apply_alibi(scores, step_begin, step_end, slopes[head] * kLog2E,
                        static_cast<float>(visible.offset + token - tile));
          }
        }
        if (boundary) {
          keep_visible(scores, step_begin, step_end, column(visible.begin(token)), column(visible.end(token)));
        }
        if constexpr (kTuning.values_into_l1) panels.during_softmax(r, panel_rows);
        rescale[r] =
            softmax_row(scores, step_begin, step_end, adjusted ? 1.0f : factor, row_factors, weights + r * kKvTile,
                        scratch.reference[row], scratch.sums + static_cast<size_t>(row) * kWidth);
      }
      // Only the visible columns: V rows that no row of the panel sees must not even be multiplied by zero, because
      // zero times a NaN in an unwritten page is NaN.
      panels.add_values(first_row, panel_rows, weights, begin, end, rescale);
    }
    panels.finish();
    KvRows<T>* done = rows;
    rows = upcoming;
    upcoming = done;
  }
  panels.arrange_output(num_rows);
}

template <class T, class Panels>
void attend_with(const fa_attention_problem& problem, const WorkItem& item, const WorkItem* following, void* memory) {
  const int head_size = problem.head_size;
  const int num_rows = item.num_tokens * (problem.num_heads / problem.num_kv_heads);
  const int stride = Panels::output_stride(head_size);
  const Scratch scratch(memory, num_rows, head_size);

  load_queries(problem, item, Panels::query_stride(head_size), static_cast<typename Panels::Element*>(scratch.query));
  __builtin_memset(scratch.output, 0, sizeof(float) * round_up(num_rows, kPadding) * stride);
  __builtin_memset(scratch.sums, 0, sizeof(float) * num_rows * kWidth);
  for (int r = 0; r < num_rows; ++r) scratch.reference[r] = -kInfinity;
  attend_tiles<T, Panels>(problem, item, following, num_rows, scratch);

  const auto row_output = [&](int row) { return scratch.output + static_cast<size_t>(row) * stride; };
  const auto row_sum = [&](int row) { return reduce_add(load(scratch.sums + static_cast<size_t>(row) * kWidth)); };
  if (item.partial == nullptr) {
    for_each_row(problem, item, [&](int64_t token, int64_t head, int row) {
      finish_row(problem, token, head, row_output(row), scratch.reference[row], row_sum(row));
    });
    return;
  }
  float* reference = item.partial + static_cast<size_t>(num_rows) * head_size;
  for (int r = 0; r < num_rows; ++r) {
    store_output(row_output(r), head_size, 1.0f, item.partial + static_cast<size_t>(r) * head_size);
    reference[r] = scratch.reference[r];
    reference[num_rows + r] = row_sum(r);
  }
}

// Up to this many query rows over an 8-bit cache, AMX is not used.
template <class T>
constexpr int kRowsInFp32 = 0;
template <>
constexpr int kRowsInFp32<Int8> = kTuning.max_fma_rows_int8;

template <class T>
void attend_kv(const fa_attention_problem& problem, const WorkItem& item, const WorkItem* following, void* memory) {
  const int num_rows = item.num_tokens * (problem.num_heads / problem.num_kv_heads);
#if defined(FA_AVX512_BF16)
  // These panels need operands that one bf16, or a sum of two, holds exactly. They also need a positive scale: the
  // maximum is taken of unscaled scores.
  const bool ordered = score_factor(problem, static_cast<const BFloat16*>(nullptr)) > 0.0f;
  if constexpr (kExactInBf16<T>) {
    if constexpr (kTuning.max_dot_rows > 0) {
      if (problem.dtype == FA_BF16 && ordered && num_rows <= kTuning.max_dot_rows && can_dot(problem)) {
        return problem.head_size > kTuning.dot_tile_head_size
                   ? attend_with<T, DotPanels<T, kTuning.dot_tile>>(problem, item, following, memory)
                   : attend_with<T, DotPanels<T, 2 * kTuning.dot_tile>>(problem, item, following, memory);
      }
    }
    if (problem.dtype == FA_BF16 && ordered && num_rows > kTuning.max_direct_rows_bf16) {
#if defined(FA_AMX)
      if (num_rows <= kTuning.max_amx_direct_rows && AmxDirectPanels<T>::can_run(problem)) {
        return attend_with<T, AmxDirectPanels<T>>(problem, item, following, memory);
      }
      return attend_with<T, AmxPanels<T>>(problem, item, following, memory);
#else
      return attend_with<T, PackedPanels<T, Bf16Unit>>(problem, item, following, memory);
#endif
    }
  }
#endif
#if defined(FA_AMX)
  if constexpr (sizeof(T) == 1) {
    if (problem.dtype == FA_BF16 && ordered && num_rows > kRowsInFp32<T> && AmxBytePanels<T>::can_run(problem)) {
      return num_rows <= kTuning.max_amx_bytes_rows ? attend_with<T, AmxBytePanels<T>>(problem, item, following, memory)
                                                    : attend_with<T, AmxPanels<T>>(problem, item, following, memory);
    }
  }
  if constexpr (kIsSumOfTwoBf16<T>) {
    if (problem.dtype == FA_F16 && ordered) {
      const bool even = AmxSplitPanels<T>::can_run(problem);
      if (even && num_rows > kTuning.max_fma_rows_split && num_rows <= kTuning.max_amx_split_rows) {
        return attend_with<T, AmxSplitPanels<T>>(problem, item, following, memory);
      }
      if (num_rows > (even ? kTuning.max_amx_split_rows : kTuning.max_fma_rows_split_packed)) {
        return attend_with<T, AmxPanels<T>>(problem, item, following, memory);
      }
    }
  }
#endif
#if defined(FA_BF16_PAIRS)
  if constexpr (kReadInPairs<T>) {
    const bool paired = PairPanels<T>::can_run(problem) && num_rows != kTuning.unpaired_rows;
    if (num_rows <= kTuning.max_pair_rows && paired) {
      return attend_with<T, PairPanels<T>>(problem, item, following, memory);
    }
    if (num_rows <= kTuning.max_transposed_k_rows_pairs && paired) {
      return attend_with<T, TransposedKPanels<T, TransposedPairs<T>>>(problem, item, following, memory);
    }
  }
#endif
  // The second number is a whole number of passes. Slightly fewer rows need as many passes, or more.
  if (num_rows <= kTuning.max_direct_rows || (num_rows == kTuning.whole_direct_rows && sizeof(T) > 1)) {
    return attend_with<T, DirectPanels<T>>(problem, item, following, memory);
  }
  if constexpr (kTuning.max_transposed_k_rows > 0) {
    if (num_rows <= (sizeof(T) > 1 ? kTuning.max_transposed_k_rows : kTuning.max_transposed_k_rows_fp8)) {
      return attend_with<T, TransposedKPanels<T, TransposedKeys<T>>>(problem, item, following, memory);
    }
  }
  attend_with<T, PackedPanels<T, FmaUnit>>(problem, item, following, memory);
}

void attend(const fa_attention_problem& problem, const WorkItem& item, const WorkItem* following, void* memory) {
  with_kv_dtype(problem.kv_dtype, [&](auto* type) { attend_kv<__typeof__(*type)>(problem, item, following, memory); });
}

// Merges partial results by their lse, always in KV order, so that the result does not depend on which thread finished
// first.
void merge(const fa_attention_problem& problem, const WorkItem& item, int num_splits) {
  const int head_size = problem.head_size;
  const int num_rows = item.num_tokens * (problem.num_heads / problem.num_kv_heads);
  const size_t partial_size = partial_floats(num_rows, head_size);
  for_each_row(problem, item, [&](int64_t token, int64_t head, int row) {
    const float* row_output = item.partial + static_cast<size_t>(row) * head_size;
    const float* row_reference = item.partial + static_cast<size_t>(num_rows) * head_size + row;
    float reference = -kInfinity;
    for (int i = 0; i < num_splits; ++i) {
      const float m = row_reference[i * partial_size];
      reference = m > reference ? m : reference;
    }
    const float shift = reference == -kInfinity ? 0.0f : reference;
    float weight[kMaxSplits];
    float sum = 0.0f;
    for (int i = 0; i < num_splits; ++i) {
      weight[i] = exp2(row_reference[i * partial_size] - shift);
      sum += weight[i] * row_reference[i * partial_size + num_rows];
    }
    alignas(64) float merged[kMaxHeadSize];
    for_each_vector(head_size, [&](int d, auto part) {
      Vec total = splat(0.0f);
      for (int i = 0; i < num_splits; ++i) {
        total = fma(splat(weight[i]), part.read(row_output + i * partial_size + d), total);
      }
      store(merged + d, total);
    });
    finish_row(problem, token, head, merged, reference, sum);
  });
}

}  // namespace
}  // namespace fastattention
