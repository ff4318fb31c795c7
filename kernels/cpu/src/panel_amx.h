// AMX: panels of 32 rows. Products are computed in tile registers of 16 rows x 16 columns, 32 deep. Operands are packed
// as for the bf16 dot product.
namespace fastattention {
namespace {

// GCC does not know that tile intrinsics read memory. Without this barrier it may move stores past them or drop the
// stores.
inline void memory_barrier() { asm volatile("" ::: "memory"); }

// Tiles 0 to 3 accumulate (row half * 2 + column half), 4 and 5 hold rows of the left operand, and 6 and 7 hold strips
// of the right one. All have the maximum size, 16 rows of 64 bytes.
class AmxTiles {
 public:
  AmxTiles() { configure(16); }
  // Gives tiles 2 to 5 fewer rows: a product takes one cycle per row of the left operand.
  void configure(int rows) {
    const uint8_t r = static_cast<uint8_t>(rows);
    struct alignas(64) Configuration {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16];
    } configuration = {};
    const uint8_t all_rows[8] = {16, 16, r, r, r, r, 16, 16};
    __builtin_memcpy(configuration.rows, all_rows, sizeof(all_rows));
    memory_barrier();
    _tile_loadconfig(&configuration);
  }
  ~AmxTiles() { _tile_release(); }  // other libraries expect this state, and it keeps context switches short
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;
constexpr int kTileDepth = 32;

// A tile load waits for its cache lines. Those of packed strips and of the output come from the L2 cache, so they are
// prefetched this far ahead, which is four steps, a few lines after each product.
constexpr int kFetchAhead = 4 * kTileDepth * kStrip;
constexpr int kLine = 64;
template <int Lines>
inline void fetch(const void* first) {
  FA_UNROLL
  for (int i = 0; i < Lines; ++i) __builtin_prefetch(static_cast<const char*>(first) + i * kLine, 0, 3);
}

// c[16 or 32 rows][32 columns] += a[rows][32 * steps] * b[32 * steps][32 columns], or = without Accumulate. Strides
// count elements, and b is one packed strip. TwoHalves: 32 rows. TwoColumns: 32 columns, otherwise 16. next_c: the
// output that the next call adds to, or null if not known. Where numbers have several parts, each part of a is
// multiplied by each part of b.
template <class Element, bool Accumulate, bool TwoHalves, bool TwoColumns>
inline void amx_multiply(const Element* a, int a_stride, const Element* b, int b_width, int steps, float* c,
                         int c_stride, const float* next_c = nullptr) {
  constexpr int kParts = sizeof(Element) / sizeof(BFloat16);
  constexpr int kLinesPerProduct = 2 * kTileRows / ((TwoHalves ? 2 : 1) * (TwoColumns ? 2 : 1));
  memory_barrier();
  float* lower = c + kTileRows * c_stride;
  const size_t c_bytes = c_stride * sizeof(float);
  if constexpr (Accumulate) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (TwoColumns) _tile_loadd(1, c + 16, c_bytes);
    if constexpr (TwoHalves) _tile_loadd(2, lower, c_bytes);
    if constexpr (TwoHalves && TwoColumns) _tile_loadd(3, lower + 16, c_bytes);
  } else {
    _tile_zero(0);
    if constexpr (TwoColumns) _tile_zero(1);
    if constexpr (TwoHalves) _tile_zero(2);
    if constexpr (TwoHalves && TwoColumns) _tile_zero(3);
  }
  const size_t a_bytes = a_stride * sizeof(Element);
  const size_t b_bytes = b_width * 2 * sizeof(BFloat16);
  for (int k = 0; k < steps; ++k, a += kTileDepth, b += kTileDepth * b_width) {
    FA_UNROLL
    for (int i = 0; i < kParts * kParts; ++i) {
      const BFloat16* left = reinterpret_cast<const BFloat16*>(a) + i % kParts * kTileDepth;
      const BFloat16* right = reinterpret_cast<const BFloat16*>(b) + i / kParts * kTileDepth * b_width;
      const bool new_right = i % kParts == 0;
      const char* ahead = reinterpret_cast<const char*>(right + kFetchAhead);
      _tile_loadd(4, left, a_bytes);
      if (new_right) _tile_loadd(6, right, b_bytes);
      _tile_dpbf16ps(0, 4, 6);
      if (new_right) fetch<kLinesPerProduct>(ahead);
      if constexpr (TwoColumns) {
        if (new_right) _tile_loadd(7, right + 2 * 16, b_bytes);
        _tile_dpbf16ps(1, 4, 7);
        if (new_right) fetch<kLinesPerProduct>(ahead + kLinesPerProduct * kLine);
      }
      if constexpr (TwoHalves) {
        _tile_loadd(5, left + kTileRows * a_stride * kParts, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if (new_right) fetch<kLinesPerProduct>(ahead + 2 * kLinesPerProduct * kLine);
        if constexpr (TwoColumns) {
          _tile_dpbf16ps(3, 5, 7);
          if (new_right) fetch<kLinesPerProduct>(ahead + 3 * kLinesPerProduct * kLine);
        }
      }
    }
    if constexpr (Accumulate) {
      if (next_c != nullptr) {
        FA_UNROLL
        for (int row = 0; row < 4; ++row, next_c += c_stride) fetch<2>(next_c);
      }
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (TwoColumns) _tile_stored(1, c + 16, c_bytes);
  if constexpr (TwoHalves) _tile_stored(2, lower, c_bytes);
  if constexpr (TwoHalves && TwoColumns) _tile_stored(3, lower + 16, c_bytes);
}

// Tile registers add products to the output, so the output is rescaled beforehand, which is rarely needed.
inline void rescale_rows(float* output, int rows, int stride, const float* rescale) {
  for (int r = 0; r < rows; ++r) {
    if (rescale[r] == 1.0f) continue;
    for (int d = 0; d < stride; d += kWidth) {
      store(output + r * stride + d, mul(load(output + r * stride + d), splat(rescale[r])));
    }
  }
}

// The Unit that packs a cache of this type.
template <class T>
struct AmxOperand {
  using Unit = Bf16Unit;
};
template <>
struct AmxOperand<Half> {
  using Unit = SplitUnit;
};

template <class T>
struct AmxPanels {
  using Unit = typename AmxOperand<T>::Unit;
  using Element = typename Unit::Element;
  using Weight = Element;
  static constexpr int kRows = 2 * kTileRows;
  static constexpr bool kEven = false;
  static_assert(kRows <= kPadding && kColumnStep % kTileDepth == 0 && kStrip == 32, "all shapes are whole tiles");
  const Scratch& scratch;
  int head_size;
  Prefetch<T> upcoming{};
  AmxTiles tiles{};

  static int tile_tokens(int) { return kKvTile; }
  static int query_stride(int head_size) { return round_up(head_size, kTileDepth); }
  static int output_stride(int head_size) { return round_up(head_size, 16); }

  void prepare(const KvRows<T>& rows, const KvRows<T>* next, int num_rows) {
    const int stride = output_stride(head_size);
    const int panels = (num_rows + kRows - 1) / kRows;
    const int strips = (rows.count + kStrip - 1) / kStrip + (stride + kStrip - 1) / kStrip;
    upcoming = Prefetch<T>(next, head_size,
                           (rows.count / kWidth) * (stride / kWidth) + rows.count / Unit::kDepth + panels * strips);
    // A tile product spans kTileDepth tokens, so V is padded with zeros.
    pack_tile<Unit>(rows, head_size, query_stride(head_size), round_up(rows.count, kTileDepth), stride, scratch,
                    upcoming);
  }

  void scores(int first_row, int rows, int begin, int end, float* scores) {
    const int depth = query_stride(head_size);
    const Element* query = static_cast<const Element*>(scratch.query) + static_cast<size_t>(first_row) * depth;
    for (int column = begin; column < end; column += kStrip) {
      const Element* strip = static_cast<const Element*>(scratch.keys) + static_cast<size_t>(column) * depth;
      upcoming.advance();
      const auto multiply =
          rows > kTileRows ? amx_multiply<Element, false, true, true> : amx_multiply<Element, false, false, true>;
      multiply(query, depth, strip, kStrip, depth / kTileDepth, scores + column, kKvTile, nullptr);
    }
  }

  void add_values(int first_row, int rows, Weight* weights, int begin, int end, const float* rescale) {
    const int stride = output_stride(head_size);
    float* output = scratch.output + static_cast<size_t>(first_row) * stride;
    rescale_rows(output, rows, stride, rescale);
    // Weights outside [begin, end) are zero up to the next multiple of kColumnStep, unless a factor of NaN made them
    // NaN.
    const int first = begin / kTileDepth * kTileDepth, last = round_up(end, kTileDepth);
    if constexpr (sizeof(T) == 1) {
      for (int r = 0; r < rows; ++r) {
        for (int t = first; t < begin; ++t) weights[r * kKvTile + t] = {};
        for (int t = end; t < last; ++t) weights[r * kKvTile + t] = {};
      }
    }
    const int steps = (last - first) / kTileDepth;
    const bool two_halves = rows > kTileRows;
    for (int column = 0; column < stride; column += kStrip) {
      const bool whole = stride - column >= kStrip;
      const int width = whole ? kStrip : stride - column;
      const Element* strip = static_cast<const Element*>(scratch.values) + static_cast<size_t>(column) * kKvTile +
                             static_cast<size_t>(first) * width;
      upcoming.advance();
      const auto multiply =
          two_halves ? (whole ? amx_multiply<Element, true, true, true> : amx_multiply<Element, true, true, false>)
                     : (whole ? amx_multiply<Element, true, false, true> : amx_multiply<Element, true, false, false>);
      const float* next = output + (column + kStrip < stride ? column + kStrip : kRows * stride);
      multiply(weights + first, kKvTile, strip, width, steps, output + column, stride, next);
    }
  }
  void finish() { upcoming.rest(); }
  void arrange_queries(int) {}
  void arrange_output(int) {}
};

}  // namespace
}  // namespace fastattention
