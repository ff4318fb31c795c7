// AMX for up to 128 query rows over an 8-bit cache: K and V are widened to bf16 on the way from the cache to tile
// registers; see bytes_to_bf16.h. Scores are computed transposed, as in panel_amx_direct.h, and tokens of V are paired
// while they are widened, as in panel_amx_split.h. Widening takes longer than a product, so up to 32 rows share it.
namespace fastattention {
namespace {

// A weight rounded to bf16. Those of 32 tokens are stored as 16 pairs; token i is paired with token i + 16.
struct PairedWeight {
  uint16_t bits;
};
constexpr int kPairedTokens = 2 * kTileRows;
// Rounds ties away from zero; a NaN does not carry into infinity. See odd_pair in panel_amx_direct.h.
inline void store_weights(PairedWeight* p, Vec first, Vec second) {
  const auto rounded = [](Vec a) { return _mm512_add_epi32(bits(a), _mm512_set1_epi32(0x8000)); };
  _mm512_storeu_si512(p, pairs_of(rounded(first), upper_half(bits(rounded(second)))));
}

template <class T>
struct AmxBytePanels {
  using Element = BFloat16;
  using Weight = PairedWeight;
  static constexpr int kRows = 2 * kTileRows;
  static constexpr bool kEven = false;
  static constexpr int kTileNumbers = kTileRows * kTileDepth;
  static constexpr int kParts = 4;  // of a step, each of which widens a quarter of the next step's numbers
  const Scratch& scratch;
  int head_size;
  const KvRows<T>* current = nullptr;
  Prefetch<T> upcoming{};
  AmxTiles tiles{};

  static bool can_run(const fa_attention_problem& problem) { return problem.head_size % kTileDepth == 0; }
  static int tile_tokens(int num_rows) { return num_rows <= kTileRows ? kAmxBytesTile : 2 * kAmxBytesTile; }
  static int query_stride(int head_size) { return head_size; }
  static int output_stride(int head_size) { return head_size; }

  // Rearranges each 16 rows of queries into [head_size / 32][16 pairs of dimensions][16 rows][2].
  void arrange_queries(int num_rows) {
    tiles.configure(num_rows < kTileRows ? num_rows : kTileRows);
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    BFloat16* copy = static_cast<BFloat16*>(scratch.keys);
    for (int row = 0; row < num_rows; row += kTileRows) {
      BFloat16* query = static_cast<BFloat16*>(scratch.query) + static_cast<size_t>(row) * head_size;
      __builtin_memcpy(copy, query, sizeof(BFloat16) * kTileRows * head_size);
      for (int d = 0; d < head_size; d += kTileDepth) {
        Vec block[kTileRows];
        FA_UNROLL
        for (int i = 0; i < kTileRows; ++i) {
          const __m512i numbers = _mm512_loadu_si512(copy + i * head_size + d);
          block[i] = bits(_mm512_permutex2var_epi16(numbers, pairs, numbers));
        }
        transpose(block);
        FA_UNROLL
        for (int i = 0; i < kTileRows; ++i) _mm512_storeu_si512(query + (d + 2 * i) * kTileRows, bits(block[i]));
      }
    }
  }

  void prepare(const KvRows<T>& rows, const KvRows<T>* next, int num_rows) {
    current = &rows;
    const int panels = (num_rows + kRows - 1) / kRows;
    const int steps = round_up(rows.count, kPairedTokens) / kPairedTokens * (head_size / kTileDepth);
    upcoming = Prefetch<T>(next, head_size, 2 * panels * steps * kParts);
  }

  // Each step computes 32 dimensions of 32 tokens. While the tile unit works on one step, the vector units widen the
  // operands of the next, because a tile load right after a store would have to wait for it.
  void scores(int first_row, int rows, int begin, int end, float* scores) {
    const auto compute = rows > kTileRows ? &AmxBytePanels::scores_of<2> : &AmxBytePanels::scores_of<1>;
    (this->*compute)(first_row, rows, begin, end, scores);
  }
  template <int QueryTiles>
  void scores_of(int first_row, int rows, int begin, int end, float* scores) {
    alignas(64) BFloat16 key[2][2 * kTileNumbers];
    alignas(64) float products[2 * QueryTiles][kTileRows * kTileRows];
    const BFloat16* queries = static_cast<const BFloat16*>(scratch.query) + static_cast<size_t>(first_row) * head_size;
    const BytesToBf16<T, Paired::kWithinRows> widen;
    const auto widen_part = [&](int part, const T* const* row, int d, BFloat16* to) {
      constexpr int kTokens = kPairedTokens / kParts;
      upcoming.advance();
      FA_UNROLL
      for (int t = part * kTokens; t < (part + 1) * kTokens; t += 2) {
        const PairsOfRows pairs = widen(row[t] + d, row[t + 1] + d);
        _mm512_store_si512(to + t * kTileDepth, pairs.first);
        _mm512_store_si512(to + (t + 1) * kTileDepth, pairs.second);
      }
    };
    for (int part = 0; part < kParts; ++part) widen_part(part, current->key + begin, 0, key[0]);
    int buffer = 0;
    for (int token = begin; token < end; token += kPairedTokens) {
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (QueryTiles == 2) {
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int d = 0; d < head_size; d += kTileDepth, buffer ^= 1) {
        const bool last = d + kTileDepth == head_size;
        const bool more = !last || token + kPairedTokens < end;
        const T* const* next_row = current->key + (last ? token + kPairedTokens : token);
        const int next_d = last ? 0 : d + kTileDepth;
        BFloat16* next = key[buffer ^ 1];
        const BFloat16* query = queries + d * kTileRows;
        memory_barrier();
        _tile_loadd(7, query, kTileBytes);
        _tile_loadd(6, key[buffer], kTileBytes);
        _tile_dpbf16ps(0, 6, 7);
        if (more) widen_part(0, next_row, next_d, next);
        if constexpr (QueryTiles == 2) {
          _tile_loadd(5, query + kTileRows * head_size, kTileBytes);
          _tile_dpbf16ps(2, 6, 5);
        }
        if (more) widen_part(1, next_row, next_d, next);
        _tile_loadd(6, key[buffer] + kTileNumbers, kTileBytes);
        _tile_dpbf16ps(1, 6, 7);
        if (more) widen_part(2, next_row, next_d, next);
        if constexpr (QueryTiles == 2) _tile_dpbf16ps(3, 6, 5);
        if (more) widen_part(3, next_row, next_d, next);
      }
      _tile_stored(0, products[0], kTileBytes);
      _tile_stored(1, products[1], kTileBytes);
      if constexpr (QueryTiles == 2) {
        _tile_stored(2, products[2], kTileBytes);
        _tile_stored(3, products[3], kTileBytes);
      }
      memory_barrier();
      const auto transposed = [&](auto& block, const float* of, int count, float* to) {
        load_transposed(of, block);
        for (int r = 0; r < count; ++r) store(to + r * kKvTile, block[r]);
      };
      for (int i = 0; i < 2 * QueryTiles; ++i) {
        const int first = i / 2 * kTileRows;
        const int count = rows - first < kTileRows ? rows - first : kTileRows;
        float* to = scores + first * kKvTile + token + i % 2 * kTileRows;
        Vec block[kTileRows], half[kTileRows / 2];
        count <= kTileRows / 2 ? transposed(half, products[i], count, to) : transposed(block, products[i], count, to);
      }
    }
  }

  void add_values(int first_row, int rows, PairedWeight* weights, int begin, int end, const float* rescale) {
    float* output = scratch.output + static_cast<size_t>(first_row) * head_size;
    rescale_rows(output, rows, head_size, rescale);
    const int first = begin / kPairedTokens * kPairedTokens, last = round_up(end, kPairedTokens);
    // Rows that no row of the panel sees may hold anything, so zeros replace them. Their factors may be NaN, which
    // makes a weight of 0 NaN.
    alignas(64) static const T kNothing[kMaxHeadSize] = {};
    const T* seen[kKvTile];
    const T* const* value = current->value;
    if (first < begin || end < last) {
      for (int t = first; t < last; ++t) {
        const bool visible = t >= begin && t < end;
        seen[t] = visible ? value[t] : kNothing;
        for (int r = 0; r < rows && !visible; ++r) weight_of(weights + r * kKvTile, t).bits = 0;
      }
      value = seen;
    }
    const auto add = rows > kTileRows ? &AmxBytePanels::values_of<2> : &AmxBytePanels::values_of<1>;
    (this->*add)(output, weights, value, first, last);
  }
  static PairedWeight& weight_of(PairedWeight* weights, int token) {
    const int place = token % kPairedTokens;
    return weights[token - place + place % kTileRows * 2 + place / kTileRows];
  }

  // Each step computes 32 dimensions of 32 tokens. The sums of these dimensions stay in tiles for all tokens.
  template <int RowTiles>
  void values_of(float* output, const PairedWeight* weights, const T* const* value, int begin, int end) {
    alignas(64) BFloat16 values[2][2 * kTileNumbers];
    const size_t weight_bytes = kKvTile * sizeof(PairedWeight);
    const size_t output_bytes = head_size * sizeof(float);
    const BytesToBf16<T, Paired::kAcrossRows> widen;
    const auto widen_part = [&](int part, const T* const* row, int d, BFloat16* to) {
      constexpr int kPairs = kTileRows / kParts;
      upcoming.advance();
      FA_UNROLL
      for (int t = part * kPairs; t < (part + 1) * kPairs; ++t) {
        const PairsOfRows pairs = widen(row[t] + d, row[t + kTileRows] + d);
        _mm512_store_si512(to + t * kTileDepth, pairs.first);
        _mm512_store_si512(to + (kTileRows + t) * kTileDepth, pairs.second);
      }
    };
    for (int part = 0; part < kParts; ++part) widen_part(part, value + begin, 0, values[0]);
    int buffer = 0;
    for (int d = 0; d < head_size; d += kTileDepth) {
      float* to = output + d;
      float* lower = to + kTileRows * head_size;
      memory_barrier();
      _tile_loadd(2, to, output_bytes);
      _tile_loadd(3, to + kWidth, output_bytes);
      if constexpr (RowTiles == 2) {
        _tile_loadd(0, lower, output_bytes);
        _tile_loadd(1, lower + kWidth, output_bytes);
      }
      for (int token = begin; token < end; token += kPairedTokens, buffer ^= 1) {
        const bool last = token + kPairedTokens == end;
        const bool more = !last || d + kTileDepth < head_size;
        const T* const* next_row = value + (last ? begin : token + kPairedTokens);
        const int next_d = last ? d + kTileDepth : d;
        BFloat16* next = values[buffer ^ 1];
        memory_barrier();
        _tile_loadd(4, weights + token, weight_bytes);
        _tile_loadd(6, values[buffer], kTileBytes);
        _tile_dpbf16ps(2, 4, 6);
        if (more) widen_part(0, next_row, next_d, next);
        if constexpr (RowTiles == 2) {
          _tile_loadd(5, weights + kTileRows * kKvTile + token, weight_bytes);
          _tile_dpbf16ps(0, 5, 6);
        }
        if (more) widen_part(1, next_row, next_d, next);
        _tile_loadd(7, values[buffer] + kTileNumbers, kTileBytes);
        _tile_dpbf16ps(3, 4, 7);
        if (more) widen_part(2, next_row, next_d, next);
        if constexpr (RowTiles == 2) _tile_dpbf16ps(1, 5, 7);
        if (more) widen_part(3, next_row, next_d, next);
      }
      _tile_stored(2, to, output_bytes);
      _tile_stored(3, to + kWidth, output_bytes);
      if constexpr (RowTiles == 2) {
        _tile_stored(0, lower, output_bytes);
        _tile_stored(1, lower + kWidth, output_bytes);
      }
    }
    memory_barrier();
  }
  void finish() { upcoming.rest(); }
  void arrange_output(int) {}
};

}  // namespace
}  // namespace fastattention
