// AMX for few query rows and an fp16 cache: K and V are split into bf16 parts on the way from the cache to tile
// registers; see unit_split.h. Scores are computed transposed, as in panel_amx_direct.h. Values need no such step,
// because splitting already pairs tokens.
namespace fastattention {
namespace {

template <class T>
struct AmxSplitPanels {
  using Element = SplitNumber;
  using Weight = SplitNumber;
  static constexpr int kRows = kTileRows;
  static constexpr bool kEven = false;
  static constexpr int kRowsPerStep = 4;  // rows of K or V between prefetch steps
  const Scratch& scratch;
  int head_size;
  const KvRows<T>* current = nullptr;
  Prefetch<T> upcoming{};
  int num_rows = 0;
  AmxTiles tiles{};

  static bool can_run(const fa_attention_problem& problem) { return problem.head_size % kTileDepth == 0; }
  static int tile_tokens(int num_rows) { return num_rows <= kTileRows / 2 ? kAmxSplitTile : 2 * kAmxSplitTile; }
  static int query_stride(int head_size) { return head_size; }
  static int output_stride(int head_size) { return head_size; }

  // With up to 8 rows, a tile of queries has the upper parts in columns 0 to 7 and the lower parts in columns 8 to 15,
  // so that one product covers both. With more rows, upper and lower parts have separate tiles.
  bool in_one_tile() const { return num_rows <= kTileRows / 2; }

  void arrange_queries(int rows) {
    num_rows = rows;
    tiles.configure(rows < kTileRows ? rows : kTileRows);
    for (int row = 0; row < rows; row += kTileRows) {
      arrange_panel(static_cast<SplitNumber*>(scratch.query) + static_cast<size_t>(row) * head_size);
    }
  }
  void arrange_panel(SplitNumber* query) {
    SplitNumber* copy = static_cast<SplitNumber*>(scratch.keys);
    __builtin_memcpy(copy, query, sizeof(SplitNumber) * kTileRows * head_size);
    for (int d = 0; d < head_size; d += kTileDepth) {
      for (int part = 0; part < (in_one_tile() ? 1 : 2); ++part) {
        Vec block[kTileRows];
        for (int i = 0; i < kTileRows; ++i) {
          const SplitNumber* row = copy + d + part * kWidth;
          row += in_one_tile() ? i % 8 * head_size + i / 8 * kWidth : i * head_size;
          block[i] = bits(_mm512_loadu_si512(row));
        }
        transpose(block);
        SplitNumber* to = query + d * (in_one_tile() ? kTileRows / 2 : kTileRows) + part * kTileRows * kWidth;
        for (int i = 0; i < kTileRows; ++i) _mm512_storeu_si512(to + i * kWidth, bits(block[i]));
      }
    }
  }

  void prepare(const KvRows<T>& rows, const KvRows<T>* next, int) {
    current = &rows;
    const int panels = (num_rows + kRows - 1) / kRows;
    const int groups = round_up(rows.count, kTileDepth) / kTileRows;
    upcoming =
        Prefetch<T>(next, head_size, 2 * panels * groups * (head_size / kTileDepth) * (kTileRows / kRowsPerStep));
  }

  // Each step computes 32 dimensions of 16 tokens. While the tile unit works on one step, the vector units split the
  // operands of the next, because a tile load right after a store would have to wait for it.
  void scores(int first_row, int rows, int begin, int end, float* scores) {
    const auto compute = in_one_tile() ? &AmxSplitPanels::scores_of<1> : &AmxSplitPanels::scores_of<2>;
    (this->*compute)(first_row, rows, begin, end, scores);
  }
  template <int QueryTiles>
  void scores_of(int first_row, int rows, int begin, int end, float* scores) {
    alignas(64) SplitNumber key[2][kTileRows * kTileDepth];
    alignas(64) float products[2][kTileRows * kTileRows];
    const int steps = head_size / kTileDepth;
    const SplitNumber* queries =
        static_cast<const SplitNumber*>(scratch.query) + static_cast<size_t>(first_row) * head_size;
    const auto part_rows = [&](const T* const* row, int d, int first, SplitNumber* to) {
      upcoming.advance();
      FA_UNROLL
      for (int t = first; t < first + kRowsPerStep; ++t) {
        const SplitPairs pairs = split_pairs(load(row[t] + d), load(row[t] + d + kWidth));
        _mm512_store_si512(to + t * kWidth, pairs.upper);
        _mm512_store_si512(to + (kTileRows + t) * kWidth, pairs.lower);
      }
    };
    for (int i = 0; i < kTileRows; i += kRowsPerStep) part_rows(current->key + begin, 0, i, key[0]);
    int buffer = 0;
    for (int token = begin; token < end; token += kTileRows) {
      const SplitNumber* query = queries;
      _tile_zero(0);
      _tile_zero(1);
      for (int step = 0; step < steps; ++step, buffer ^= 1, query += QueryTiles * kTileRows * kWidth) {
        const bool last = step + 1 == steps;
        const bool more = !last || token + kTileRows < end;
        const T* const* next_row = current->key + (last ? token + kTileRows : token);
        const int next_d = last ? 0 : (step + 1) * kTileDepth;
        const SplitNumber* upper = key[buffer];
        SplitNumber* next = key[buffer ^ 1];
        memory_barrier();
        _tile_loadd(7, query, kTileBytes);
        _tile_loadd(6, upper, kTileBytes);
        _tile_dpbf16ps(0, 6, 7);
        if (more) part_rows(next_row, next_d, 0, next);
        if constexpr (QueryTiles == 2) {
          _tile_loadd(7, query + kTileRows * kWidth, kTileBytes);
          _tile_dpbf16ps(0, 6, 7);
        }
        if (more) part_rows(next_row, next_d, kRowsPerStep, next);
        _tile_loadd(6, upper + kTileRows * kWidth, kTileBytes);
        _tile_dpbf16ps(1, 6, 7);
        if (more) part_rows(next_row, next_d, 2 * kRowsPerStep, next);
        if constexpr (QueryTiles == 2) {
          _tile_loadd(7, query, kTileBytes);
          _tile_dpbf16ps(1, 6, 7);
        }
        if (more) part_rows(next_row, next_d, 3 * kRowsPerStep, next);
      }
      _tile_stored(0, products[0], kTileBytes);
      _tile_stored(1, products[1], kTileBytes);
      memory_barrier();
      Vec block[kTileRows];
      FA_UNROLL
      for (int t = 0; t < kTileRows; ++t) {
        block[t] = add(load(products[0] + t * kTileRows), load(products[1] + t * kTileRows));
      }
      transpose(block);
      if constexpr (QueryTiles == 1) {
        FA_UNROLL
        for (int r = 0; r < kTileRows / 2; ++r) block[r] = add(block[r], block[kTileRows / 2 + r]);
      }
      for (int r = 0; r < rows; ++r) store(scores + r * kKvTile + token, block[r]);
    }
  }

  // Each step computes 16 dimensions of 32 tokens.
  void add_values(int first_row, int rows, const SplitNumber* weights, int begin, int end, const float* rescale) {
    const int stride = head_size;
    float* output = scratch.output + static_cast<size_t>(first_row) * stride;
    rescale_rows(output, rows, stride, rescale);
    alignas(64) static const T kNothing[kMaxHeadSize] = {};
    alignas(64) SplitNumber value[2][kTileDepth * kWidth];
    const size_t weight_bytes = kKvTile * sizeof(SplitNumber);
    const size_t output_bytes = stride * sizeof(float);
    for (int token = begin / kTileDepth * kTileDepth; token < end; token += kTileDepth) {
      // Rows that no row of the panel sees may hold anything, so zeros replace them.
      const T* const* row = current->value + token;
      const T* seen[kTileDepth];
      if (token < begin || token + kTileDepth > end) {
        for (int t = 0; t < kTileDepth; ++t) seen[t] = token + t >= begin && token + t < end ? row[t] : kNothing;
        row = seen;
      }
      const auto part_rows = [&](int d, int first, SplitNumber* to) {
        upcoming.advance();
        FA_UNROLL
        for (int t = first; t < first + kRowsPerStep; ++t) {
          const SplitPairs pairs = split_pairs(load(row[t] + d), load(row[t + kTileRows] + d));
          _mm512_store_si512(to + t * kWidth, pairs.upper);
          _mm512_store_si512(to + (kTileRows + t) * kWidth, pairs.lower);
        }
      };
      for (int i = 0; i < kTileRows; i += kRowsPerStep) part_rows(0, i, value[0]);
      memory_barrier();
      _tile_loadd(4, weights + token, weight_bytes);
      _tile_loadd(5, weights + token + kWidth, weight_bytes);
      for (int d = 0; d < stride; d += 2 * kWidth) {
        float* to = output + d;
        memory_barrier();
        _tile_loadd(2, to, output_bytes);
        _tile_loadd(6, value[0], kTileBytes);
        _tile_dpbf16ps(2, 4, 6);
        part_rows(d + kWidth, 0, value[1]);
        _tile_dpbf16ps(2, 5, 6);
        part_rows(d + kWidth, kRowsPerStep, value[1]);
        _tile_loadd(7, value[0] + kTileRows * kWidth, kTileBytes);
        _tile_dpbf16ps(2, 4, 7);
        part_rows(d + kWidth, 2 * kRowsPerStep, value[1]);
        _tile_dpbf16ps(2, 5, 7);
        part_rows(d + kWidth, 3 * kRowsPerStep, value[1]);
        const int next = d + 2 * kWidth;
        const bool more = next < stride;
        memory_barrier();
        _tile_loadd(3, to + kWidth, output_bytes);
        _tile_loadd(6, value[1], kTileBytes);
        _tile_dpbf16ps(3, 4, 6);
        if (more) part_rows(next, 0, value[0]);
        _tile_dpbf16ps(3, 5, 6);
        if (more) part_rows(next, kRowsPerStep, value[0]);
        _tile_loadd(7, value[1] + kTileRows * kWidth, kTileBytes);
        _tile_dpbf16ps(3, 4, 7);
        if (more) part_rows(next, 2 * kRowsPerStep, value[0]);
        _tile_dpbf16ps(3, 5, 7);
        if (more) part_rows(next, 3 * kRowsPerStep, value[0]);
        _tile_stored(2, to, output_bytes);
        _tile_stored(3, to + kWidth, output_bytes);
      }
    }
  }
  void finish() { upcoming.rest(); }
  void arrange_output(int) {}
};

}  // namespace
}  // namespace fastattention
