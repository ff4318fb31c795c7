// The tile shapes from the tuning table, and the scratch memory of one work item.
namespace fastattention {
namespace {

constexpr int kKvTile = kTuning.kv_tile;
constexpr int kPanelRows = kTuning.panel_rows;
constexpr int kPanelVectors = kTuning.panel_vectors;
constexpr int kDirectRows = kTuning.direct_rows;
constexpr int kDirectAccumulators = kTuning.direct_accumulators;
constexpr int kTransposedRows = kTuning.transposed_rows;
constexpr int kTransposedAccumulators = kTuning.transposed_accumulators;
constexpr int kDirectTile = kTuning.direct_tile;
constexpr int kAmxDirectTile = kTuning.amx_direct_tile;
constexpr int kAmxSplitTile = kTuning.amx_split_tile;
constexpr int kAmxBytesTile = kTuning.amx_bytes_tile;
static_assert(kDirectTile <= kKvTile && 2 * kAmxDirectTile <= kKvTile && 2 * kAmxSplitTile <= kKvTile &&
                  2 * kAmxBytesTile <= kKvTile,
              "scratch memory holds tiles of kKvTile tokens");
static_assert((kDirectRows & (kDirectRows - 1)) == 0 && kDirectRows <= kWidth,
              "direct panels split their rows into powers of two");

// Packed operands are strips of kStrip columns, each [depth / kDepth][columns][kDepth]. A register tile reads its strip
// from front to back, and the strip stays in the L1 cache while one panel of rows after another uses it.
constexpr int kStrip = kPanelVectors * kWidth;
static_assert(kKvTile % kStrip == 0, "a tile is a whole number of strips");
// Scores are computed and turned into weights for whole groups of this many KV tokens.
constexpr int kColumnStep = kStrip;
static_assert(kDirectTile % kColumnStep == 0 && kAmxDirectTile % kColumnStep == 0 && kAmxSplitTile % kColumnStep == 0 &&
                  kAmxBytesTile % kColumnStep == 0,
              "a tile is a whole number of column steps");

// Rows and dimensions are padded to a multiple of this: a pair of AMX tiles has 32 rows, and one AMX product spans 32
// dimensions.
constexpr int kPadding = 32;

struct Scratch {
  void* query;       // [rows][Panels::query_stride] in the panels' element type
  float* output;     // [rows][Panels::output_stride], unnormalised
  float* reference;  // [rows], the score that a row's weights are relative to, in base 2
  float* sums;       // [rows][kWidth], one sum per lane
  float* scores;     // [Panels::kRows][kKvTile]
  void* keys;        // packed K of the tile
  void* values;      // packed V of the tile
  size_t floats;

  Scratch(void* memory, int rows, int head_size) : floats(0) {
    const size_t stride = round_up(head_size, kPadding);
    const size_t padded = round_up(rows, kPadding);
    const auto take = [&](size_t count) {
      float* part = memory != nullptr ? static_cast<float*>(memory) + floats : nullptr;
      floats += (count + 15) / 16 * 16;  // every part starts on a cache line
      return part;
    };
    query = take(padded * stride);
    output = take(padded * stride);
    reference = take(padded);
    sums = take(padded * kWidth);
    scores = take(kPadding * kKvTile);
    keys = take(stride * kKvTile);
    values = take(kKvTile * stride);
  }
};

size_t scratch_bytes(int rows, int head_size) { return Scratch(nullptr, rows, head_size).floats * sizeof(float); }

}  // namespace
}  // namespace fastattention
