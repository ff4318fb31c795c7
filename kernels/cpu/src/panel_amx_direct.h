// AMX for few query rows (decode): tile registers load K and V from the cache without packing.
//
// Scores: K is the left operand (16 tokens x 32 dimensions) and the transposed queries are the right one, so the
// products are transposed scores. Transposing those back takes a quarter of the time of transposing K.
// Values: the dot product sums pairs of neighbours in a row, which in a row of V are two dimensions of one token. With
// the pair (weight, 0) on the left it yields the even dimensions, and with (0, weight) the odd ones, so tokens need not
// be interleaved. Up to 8 rows take half a tile, and the other half of the same tile computes the even dimensions. More
// rows take twice the products.
namespace fastattention {
namespace {

// The pair (0, weight): a weight rounded to bf16, with zeros in the lower half.
struct OddPair {
  uint32_t bits;
};
inline __m512i odd_pair(Vec weight) {
  // Rounds ties away from zero, unlike vcvtneps2bf16, in a third of its time. A NaN here came from bf16 or is the
  // default NaN. Its lower half is zero, so rounding does not carry.
  return _mm512_andnot_si512(_mm512_set1_epi32(0xffff), _mm512_add_epi32(bits(weight), _mm512_set1_epi32(0x8000)));
}
inline void store_weights(OddPair* p, Vec first, Vec second) {
  _mm512_storeu_si512(p, odd_pair(first));
  _mm512_storeu_si512(p + kWidth, odd_pair(second));
}

template <class T>
struct AmxDirectPanels {
  using Element = BFloat16;
  using Weight = OddPair;
  static constexpr int kRows = kTileRows;
  static constexpr bool kEven = false;
  static constexpr int kHalf = kTileRows / 2;
  static constexpr int kTransposeSteps = 2;  // prefetch steps for each 16 tokens
  const Scratch& scratch;
  int head_size;
  const KvRows<T>* current = nullptr;
  Prefetch<T> upcoming{};
  bool few = false;  // up to kHalf rows
  AmxTiles tiles{};

  static bool can_run(const fa_attention_problem& problem) { return problem.head_size % kTileDepth == 0; }
  // Each panel loads and stores its output in each tile, so short tiles pay off for a single panel only.
  static int tile_tokens(int num_rows) {
    if (num_rows > kRows) return kKvTile;
    return num_rows > kHalf ? kAmxDirectTile : 2 * kAmxDirectTile;
  }
  static int query_stride(int head_size) { return head_size; }
  static int output_stride(int head_size) { return head_size; }

  // Rearranges each 16 rows of queries into [head_size / 2][16 rows][2].
  void arrange_queries(int num_rows) {
    few = num_rows <= kHalf;
    BFloat16* copy = static_cast<BFloat16*>(scratch.keys);
    for (int row = 0; row < num_rows; row += kTileRows) {
      BFloat16* query = static_cast<BFloat16*>(scratch.query) + static_cast<size_t>(row) * head_size;
      __builtin_memcpy(copy, query, sizeof(BFloat16) * kTileRows * head_size);
      for (int d = 0; d < head_size; d += kTileDepth) {
        Vec block[kTileRows];
        FA_UNROLL
        for (int i = 0; i < kTileRows; ++i) block[i] = bits(_mm512_loadu_si512(copy + i * head_size + d));
        transpose(block);
        FA_UNROLL
        for (int i = 0; i < kTileRows; ++i) {
          _mm512_storeu_si512(query + (d / 2 + i) * 2 * kTileRows, bits(block[i]));
        }
      }
    }
  }

  void prepare(const KvRows<T>& rows, const KvRows<T>* next, int num_rows) {
    current = &rows;
    const int panels = (num_rows + kRows - 1) / kRows;
    const int tiles_of_rows = round_up(rows.count, kTileRows) / kTileRows;
    upcoming = Prefetch<T>(next, head_size, panels * tiles_of_rows * (3 * head_size / kTileDepth + kTransposeSteps));
  }

  // The address of the 16 rows from token on, and the distance between them in bytes. Evenly spaced rows are read in
  // the cache. Others are copied first, and rows past the end of the tile are zero in the copy.
  const BFloat16* rows_at(const T* const* rows, int token, int64_t stride, BFloat16* copy, size_t* bytes) const {
    if (current->even[token / kTileRows]) {
      *bytes = stride * sizeof(BFloat16);
      return rows[token];
    }
    for (int i = 0; i < kTileRows; ++i) {
      BFloat16* to = copy + i * head_size;
      if (token + i < current->count) {
        __builtin_memcpy(to, rows[token + i], sizeof(BFloat16) * head_size);
      } else {
        __builtin_memset(to, 0, sizeof(BFloat16) * head_size);
      }
    }
    *bytes = head_size * sizeof(BFloat16);
    return copy;
  }

  const BFloat16* values_at(int token, size_t* bytes) const {
    return rows_at(current->value, token, current->value_stride, static_cast<BFloat16*>(scratch.keys), bytes);
  }

  void scores(int first_row, int rows, int begin, int end, float* scores) {
    const BFloat16* query = static_cast<const BFloat16*>(scratch.query) + static_cast<size_t>(first_row) * head_size;
    BFloat16* copy = static_cast<BFloat16*>(scratch.keys);
    alignas(64) float products[2 * kTileRows * kTileRows];
    for (int token = begin; token < end; token += 2 * kTileRows) {
      size_t bytes[2];
      const BFloat16* key[2];
      for (int i = 0; i < 2; ++i) {
        key[i] = rows_at(current->key, token + i * kTileRows, current->key_stride, copy + i * kTileRows * kMaxHeadSize,
                         &bytes[i]);
      }
      memory_barrier();
      _tile_zero(0);
      _tile_zero(1);
      for (int d = 0; d < head_size; d += kTileDepth) {
        _tile_loadd(6, query + d * kTileRows, kTileBytes);
        _tile_loadd(4, key[0] + d, bytes[0]);
        _tile_dpbf16ps(0, 4, 6);
        upcoming.advance();
        _tile_loadd(5, key[1] + d, bytes[1]);
        _tile_dpbf16ps(1, 5, 6);
        upcoming.advance();
      }
      _tile_stored(0, products, kTileBytes);
      _tile_stored(1, products + kTileRows * kTileRows, kTileBytes);
      memory_barrier();
      const auto transposed = [&](auto& block, const float* of, float* to) {
        upcoming.advance();
        load_transposed(of, block);
        upcoming.advance();
        for (int r = 0; r < rows; ++r) store(to + r * kKvTile, block[r]);
      };
      for (int i = 0; i < 2; ++i) {
        const float* of = products + i * kTileRows * kTileRows;
        float* to = scores + token + i * kTileRows;
        Vec block[kTileRows], half[kHalf];
        few ? transposed(half, of, to) : transposed(block, of, to);
      }
    }
  }

  void add_values(int first_row, int rows, const OddPair* weights, int begin, int end, const float* rescale) {
    // The pairs (weight, 0). If there is room, they follow the pairs (0, weight) in the same tiles.
    uint32_t* even =
        few ? reinterpret_cast<uint32_t*>(scratch.scores) + kHalf * kKvTile : static_cast<uint32_t*>(scratch.values);
    begin = begin / kTileRows * kTileRows;
    end = round_up(end, kTileRows);
    for (int r = 0; r < rows; ++r) {
      for (int column = begin; column < end; column += kWidth) {
        const __m512i odd = _mm512_loadu_si512(weights + r * kKvTile + column);
        _mm512_storeu_si512(even + r * kKvTile + column, _mm512_srli_epi32(odd, 16));
      }
    }
    if (few) {
      rescale_rows(scratch.output, rows, head_size / 2, rescale);
      rescale_rows(scratch.output + kHalf * head_size / 2, rows, head_size / 2, rescale);
      add_together(weights, begin, end);
    } else {
      float* output = scratch.output + static_cast<size_t>(first_row) * head_size;
      rescale_rows(output, rows, head_size, rescale);
      add_apart(output, weights, even, begin, end);
    }
  }

  // The output is [kHalf rows][head_size / 2] of odd dimensions, followed by the same of even ones.
  void add_together(const OddPair* weights, int begin, int end) {
    constexpr int kTilesAtOnce = 4;
    const size_t output_bytes = head_size / 2 * sizeof(float);
    for (int d = 0; d < head_size; d += kTilesAtOnce * kTileDepth) {
      const int left = (head_size - d) / kTileDepth;
      const auto add = left == 1   ? &AmxDirectPanels::add_tiles<1>
                       : left == 2 ? &AmxDirectPanels::add_tiles<2>
                       : left == 3 ? &AmxDirectPanels::add_tiles<3>
                                   : &AmxDirectPanels::add_tiles<kTilesAtOnce>;
      (this->*add)(weights, begin, end, d, scratch.output + d / 2, output_bytes);
    }
  }
  template <int Tiles>
  void add_tiles(const OddPair* weights, int begin, int end, int d, float* to, size_t output_bytes) {
    memory_barrier();
    _tile_loadd(0, to, output_bytes);
    if constexpr (Tiles > 1) _tile_loadd(1, to + kTileRows, output_bytes);
    if constexpr (Tiles > 2) _tile_loadd(2, to + 2 * kTileRows, output_bytes);
    if constexpr (Tiles > 3) _tile_loadd(3, to + 3 * kTileRows, output_bytes);
    for (int token = begin; token < end; token += kTileRows) {
      size_t bytes;
      const BFloat16* value = values_at(token, &bytes) + d;
      memory_barrier();
      _tile_loadd(4, weights + token, kKvTile * sizeof(float));
      const auto next = [&] { upcoming.advance(), upcoming.advance(); };
      _tile_loadd(6, value, bytes);
      _tile_dpbf16ps(0, 4, 6);
      next();
      if constexpr (Tiles > 1) {
        _tile_loadd(7, value + kTileDepth, bytes);
        _tile_dpbf16ps(1, 4, 7);
        next();
      }
      if constexpr (Tiles > 2) {
        _tile_loadd(6, value + 2 * kTileDepth, bytes);
        _tile_dpbf16ps(2, 4, 6);
        next();
      }
      if constexpr (Tiles > 3) {
        _tile_loadd(7, value + 3 * kTileDepth, bytes);
        _tile_dpbf16ps(3, 4, 7);
        next();
      }
    }
    _tile_stored(0, to, output_bytes);
    if constexpr (Tiles > 1) _tile_stored(1, to + kTileRows, output_bytes);
    if constexpr (Tiles > 2) _tile_stored(2, to + 2 * kTileRows, output_bytes);
    if constexpr (Tiles > 3) _tile_stored(3, to + 3 * kTileRows, output_bytes);
    memory_barrier();
  }

  // In the output's columns, every 32 dimensions are stored with the even ones first, then the odd ones; see
  // arrange_output.
  void add_apart(float* output, const OddPair* weights, const uint32_t* even, int begin, int end) {
    const int stride = head_size;
    memory_barrier();
    const size_t weight_bytes = kKvTile * sizeof(float);
    const size_t output_bytes = stride * sizeof(float);
    for (int d = 0; d < stride; d += 2 * kTileDepth) {
      const bool two = d + kTileDepth < stride;
      float* to = output + d;
      _tile_loadd(0, to, output_bytes);
      _tile_loadd(1, to + 16, output_bytes);
      if (two) {
        _tile_loadd(2, to + 32, output_bytes);
        _tile_loadd(3, to + 48, output_bytes);
      }
      for (int token = begin; token < end; token += kTileRows) {
        size_t bytes;
        const BFloat16* value = values_at(token, &bytes) + d;
        memory_barrier();
        _tile_loadd(4, even + token, weight_bytes);
        _tile_loadd(5, weights + token, weight_bytes);
        _tile_loadd(6, value, bytes);
        _tile_dpbf16ps(0, 4, 6);
        upcoming.advance();
        _tile_dpbf16ps(1, 5, 6);
        upcoming.advance();
        if (two) {
          _tile_loadd(7, value + kTileDepth, bytes);
          _tile_dpbf16ps(2, 4, 7);
          upcoming.advance();
          _tile_dpbf16ps(3, 5, 7);
          upcoming.advance();
        }
      }
      _tile_stored(0, to, output_bytes);
      _tile_stored(1, to + 16, output_bytes);
      if (two) {
        _tile_stored(2, to + 32, output_bytes);
        _tile_stored(3, to + 48, output_bytes);
      }
    }
  }
  void finish() { upcoming.rest(); }

  void arrange_output(int num_rows) {
    const float* halves = static_cast<const float*>(scratch.values);
    if (few) __builtin_memcpy(scratch.values, scratch.output, sizeof(float) * kHalf * head_size);
    for (int r = 0; r < num_rows; ++r) {
      for (int d = 0; d < head_size; d += 2 * kWidth) {
        float* to = scratch.output + static_cast<size_t>(r) * head_size + d;
        const float* half = halves + (r * head_size + d) / 2;
        Vec even = load(few ? half + kHalf * head_size / 2 : to);
        Vec odd = load(few ? half : to + kWidth);
        join_pairs(even, odd);
        store(to, even);
        store(to + kWidth, odd);
      }
    }
  }
};

}  // namespace
}  // namespace fastattention
